"""inspect, verify, diff, compact and export say what the tables held when they were saved."""

from __future__ import annotations

import json
import struct
import sys

import numpy
import pytest
import torch

from tests.support.checkpoint_models import make_tables, model_contents, train
from torchrec_hkv import HashTable, checkpoint
from torchrec_hkv.cli import main

NAME = "ebc.embedding_bags.{}"
DIMS = {"lru": 12, "lfu": 8}


def _write(rank, world_size, device, folder, sharding_type):
    model = make_tables(world_size, device, sharding_type, "adagrad", rows=150, deterministic=True)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    states = []
    for write in range(3):
        train(model, rank, device, range(4 * write, 4 * write + 4))
        writer.write()
        states.append(model_contents(model, "adagrad"))
    checkpoint.save(folder / "full", model)
    return states


def _entries(results, write, table):
    """By id: the values of its row by column, its step and its score."""
    entries: dict[int, dict] = {}
    for name, id_, at, *rest in (value for result in results for value in result[write]):
        if name == table and id_ != "all":
            entry = entries.setdefault(id_, {"row": {}, "step": None, "score": None})
            if at == "entry":
                entry["step"], entry["score"] = rest
            elif rest[0] == "row":
                entry["row"][at] = struct.unpack("f", struct.pack("i", rest[1]))[0]
    return {
        id_: ([entry["row"][c] for c in sorted(entry["row"])], entry["step"], entry["score"])
        for id_, entry in entries.items()
    }


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """Chains of both sharding types and what was held, made once."""
    return tmp_path_factory.mktemp("chains"), {}


@pytest.fixture(params=["row_wise", "column_wise"])
def chain(request, chains, run_ranks):
    folder, made = chains
    if request.param not in made:
        made[request.param] = run_ranks(2, _write, folder / request.param, request.param)
    return folder / request.param, made[request.param]


def _run(capsys, *arguments, code=0):
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_inspect(capsys, chain):
    folder, results = chain
    for write, path in ((2, "chain"), (1, "chain/delta-000001"), (2, "full")):
        content = _run(capsys, "inspect", folder / path, "--memory", "64KiB")
        assert content["world_size"] == 2
        tables = {table["name"]: table for table in content["tables"]}
        for table, dim in DIMS.items():
            found, entries = tables[NAME.format(table)], _entries(results, write, table)
            assert (found["ids"], found["dim"]) == (len(entries), dim)
            assert found["fill"] == len(entries) / found["slots"]
            clock = found["steps"]
            assert _histogram(clock - step for _, step, _ in entries.values()) == found["ages"]
            if table == "lfu":
                assert _histogram(score for *_, score in entries.values()) == found["counts"]
        assert "by row number" in _text(capsys, "inspect", folder / path)
    assert [link["name"] for link in _run(capsys, "inspect", folder / "chain")["chain"]] == [
        "base-000000",
        "delta-000001",
        "delta-000002",
    ]


def _text(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def _histogram(values):
    classes: dict[int, int] = {}
    for value in values:
        classes[value.bit_length()] = classes.get(value.bit_length(), 0) + 1
    return [
        {"from": (1 << c) >> 1, "to": (1 << c) - 1, "entries": n}
        for c, n in sorted(classes.items())
    ]


def test_inspect_an_id(capsys, chain):
    folder, results = chain
    entries = _entries(results, 2, "lfu")
    id_ = next(iter(entries))
    arguments = ("inspect", folder / "chain", "--table", "lfu", f"--id={id_}")
    found = _run(capsys, *arguments)["tables"][NAME.format("lfu")]
    assert (found["row"], found["last_step"], found["score"]) == entries[id_]
    assert f"id {id_} in shard" in _text(capsys, *arguments)
    missing = next(i for i in range(1000) if i not in entries)
    content = _run(capsys, "inspect", folder / "chain", "--table", "lfu", "--id", missing, code=1)
    assert content["tables"] == {NAME.format("lfu"): None}


def test_diff(capsys, chain):
    folder, results = chain
    paths = folder / "chain" / "base-000000", folder / "full"
    content = _run(capsys, "diff", *paths, "--memory", "64KiB", code=1)
    for table in DIMS:
        old, new = _entries(results, 0, table), _entries(results, 2, table)
        found, both = content["tables"][NAME.format(table)], old.keys() & new.keys()
        changed = [id_ for id_ in both if old[id_][0] != new[id_][0]]
        assert (found["before"], found["after"]) == (len(old), len(new))
        assert (found["came"], found["left"]) == (len(new) - len(both), len(old) - len(both))
        assert found["changed"] == len(changed) > 0
        assert found["steps_changed"] == sum(old[i][1:] != new[i][1:] for i in both)
        change = {i: numpy.subtract(new[i][0], old[i][0]) for i in changed}
        assert found["largest"] == pytest.approx(max(abs(c).max() for c in change.values()))
        norms = {i: numpy.linalg.norm(c) for i, c in change.items()}
        assert found["norm"] == pytest.approx(numpy.linalg.norm(list(norms.values())))
        assert found["most"][0][1] == pytest.approx(max(norms.values()))
    assert _run(capsys, "diff", folder / "chain", folder / "full")["equal"]


def test_compact(capsys, chain, tmp_path):
    folder, _ = chain
    content = _run(capsys, "compact", folder / "chain", "--into", tmp_path / "merged")
    assert content["checkpoint"] == str(tmp_path / "merged")
    assert _run(capsys, "diff", tmp_path / "merged", folder / "full")["equal"]
    assert _run(capsys, "verify", tmp_path / "merged")["whole"]


def test_verify(capsys, chain, tmp_path):
    folder, _ = chain
    main(["compact", str(folder / "chain"), "--into", str(tmp_path / "copy")])
    capsys.readouterr()
    assert _run(capsys, "verify", folder / "chain")["whole"]
    shards = sorted((tmp_path / "copy").rglob("shard-*"))
    data = shards[0].read_bytes()
    shards[0].unlink()  # the others are links
    shards[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    shards[1].unlink()
    content = _run(capsys, "verify", tmp_path / "copy", code=1)
    assert not content["whole"]
    assert len(content["damage"]) == 2
    for path, sentence in zip(shards[:2], sorted(content["damage"]), strict=True):
        assert str(path) in sentence


@pytest.mark.parametrize("table", DIMS)
def test_export(capsys, chain, tmp_path, table):
    from safetensors.numpy import load_file

    folder, results = chain
    entries = _entries(results, 2, table)
    into = tmp_path / "rows"
    for path, suffix in (("chain", ""), ("full", ".safetensors")):
        arguments = ("--table", table, "--into", f"{into}{suffix}", "--memory", "64KiB")
        content = _run(capsys, "export", folder / path, *arguments)
        assert content["ids"] == len(entries)
        if suffix:
            found = load_file(f"{into}{suffix}")
        else:
            found = {name: numpy.load(into / f"{name}.npy") for name in ("id", "row")}
        rows = dict(zip(found["id"].tolist(), found["row"].tolist(), strict=True))
        assert rows == {id_: row for id_, (row, *_) in entries.items()}


def test_export_with_states(capsys, tmp_path):
    table = HashTable(3, 100, eviction="lfu", dtype=torch.bfloat16, state_dim=2)
    ids = torch.arange(60) - 30
    table.insert_or_assign(ids, torch.randn(60, 3).bfloat16())
    table.save(tmp_path / "table")
    from safetensors.torch import load_file

    arguments = ("--into", tmp_path / "rows.safetensors", "--states")
    _run(capsys, "export", tmp_path / "table", *arguments)
    found = load_file(tmp_path / "rows.safetensors")
    rows, there = table.find(found["id"])
    assert there.all()
    assert found["row"].equal(rows)
    assert sorted(found) == ["id", "last_step", "row", "score", "state"]
    assert found["state"].shape == (60, 2)
    assert sorted(found["id"].tolist()) == ids.tolist()
    _run(capsys, "export", tmp_path / "table", "--into", tmp_path / "npy")
    assert numpy.load(tmp_path / "npy" / "row.npy").tolist() == found["row"].tolist()


def test_export_to_parquet(capsys, chain, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, results = chain
    _run(capsys, "export", folder / "chain", "--table", "lfu", "--into", tmp_path / "r.parquet")
    found = parquet.read_table(tmp_path / "r.parquet").to_pydict()
    entries = _entries(results, 2, "lfu")
    rows = dict(zip(found["id"], found["row"], strict=True))
    assert rows == {id_: row for id_, (row, *_) in entries.items()}


def _refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    assert stopped.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


def test_bad_input(capsys, tmp_path, monkeypatch):
    table = HashTable(3, 100)
    table.insert_or_assign(torch.arange(60), torch.randn(60, 3))
    table.save(tmp_path / "table")
    (tmp_path / "empty").mkdir()
    for verb in ("inspect", "verify", "compact"):
        assert "no" in _refused(capsys, verb, tmp_path / "nothing")
        assert "There is no c" in _refused(capsys, verb, tmp_path / "empty")
    folder = tmp_path / "table"
    assert "no table 'x'" in _refused(capsys, "inspect", folder, "--table", "x")
    assert "--id is 'x'" in _refused(capsys, "inspect", folder, "--id", "x")
    assert "--id is '9223372036854775808'" in _refused(capsys, "inspect", folder, "--id", 1 << 63)
    assert "--memory is 'x'" in _refused(capsys, "verify", folder, "--memory", "x")
    assert "has an unknown ending" in _refused(
        capsys, "export", folder, "--into", tmp_path / "x.csv"
    )
    nowhere = tmp_path / "nothing" / "x.safetensors"
    assert "There is no folder" in _refused(capsys, "export", folder, "--into", nowhere)
    assert "holds 'manifest.json'" in _refused(capsys, "export", folder, "--into", folder)
    narrow = HashTable(2, 100)
    narrow.save(tmp_path / "narrow")
    assert "3 values" in _refused(capsys, "diff", folder, tmp_path / "narrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    parquet = tmp_path / "x.parquet"
    assert "yarrow is not installed" in _refused(capsys, "export", folder, "--into", parquet)
