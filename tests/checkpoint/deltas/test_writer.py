"""When a DeltaWriter writes, what it keeps, and how it resumes."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.support.checkpoint_models import assert_same, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.chain import Chain, Link, digest_of


def _names(folder):
    return sorted(name for name in os.listdir(folder) if not name.endswith(".json"))


def _steps(rank, world_size, device, folder, options):
    model = make_tables(world_size, device, "row_wise")
    writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer, **options)
    written = []
    for step in range(8):
        train(model, rank, device, range(step, step + 1))
        path = writer.step()
        written.append(None if path is None else path.name)
    return written


def test_every_steps(run_ranks, tmp_path):
    for written in run_ranks(2, _steps, tmp_path / "chain", {"every_steps": 3}):
        assert written == [None, None, "base-000000", None, None, "delta-000001", None, None]


def test_every_seconds(run_ranks, tmp_path):
    results = run_ranks(2, _steps, tmp_path / "often", {"every_seconds": 1e-9})
    assert results[0] == results[1]
    assert None not in results[0]
    results = run_ranks(2, _steps, tmp_path / "never", {"every_seconds": 1e9})
    assert results == [[None] * 8] * 2


def test_bases_and_retention(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    run_ranks(2, _steps, folder, {"every_steps": 1, "base_every": 3, "keep_bases": 2})
    # Writes 0, 3 and 6 are bases.
    assert _names(folder) == [
        "base-000003",
        "base-000006",
        "delta-000004",
        "delta-000005",
        "delta-000007",
    ]
    assert json.loads((folder / "deltas.json").read_text())["number"] == 7


def _resume(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    checkpoint.load(folder, model)
    before = checkpoint.digest(model)
    writer = checkpoint.DeltaWriter(model, folder)
    names = [writer.write().name]
    train(model, rank, device, range(70, 71))
    names.append(writer.write().name)
    return before, names, checkpoint.digest(model)


def _digest(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise")
    checkpoint.load(path, model)
    return checkpoint.digest(model)


@pytest.mark.slow
def test_a_chain_goes_on_at_another_world_size(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    run_ranks(2, _steps, folder, {"every_steps": 2})
    (before, names, after), *_ = run_ranks(3, _resume, folder)
    assert names == ["base-000004", "delta-000005"]
    assert run_ranks(1, _digest, folder / "delta-000003") == [before]
    assert run_ranks(1, _digest, folder) == [after]


def _load_between(rank, world_size, device, folder):
    """Rows that change without a lookup."""
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(4))
    checkpoint.save(folder.parent / "saved", model)
    writer = checkpoint.DeltaWriter(model, folder)
    states = [(writer.write().name, checkpoint.digest(model))]
    train(model, rank, device, range(4, 6))
    states.append((writer.write().name, checkpoint.digest(model)))
    checkpoint.load(folder.parent / "saved", model)
    states.append((writer.write().name, checkpoint.digest(model)))
    rows = checkpoint.export_rows(model, "lru")
    checkpoint.import_rows(model, "lru", [(ids, rows + 1) for ids, rows in rows])
    states.append((writer.write().name, checkpoint.digest(model)))
    return states


@pytest.mark.slow
def test_rows_that_change_without_a_lookup(run_ranks, tmp_path):
    states = run_ranks(2, _load_between, tmp_path / "chain")[0]
    assert [name.split("-")[0] for name, _ in states] == ["base", "delta", "delta", "delta"]
    assert states[2][1] == states[0][1]
    for name, digest in states:
        assert run_ranks(2, _digest, tmp_path / "chain" / name) == [digest] * 2


def _others(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    first, second = (checkpoint.DeltaWriter(model, folder) for _ in range(2))
    first.write()
    second.write()
    with pytest.raises(ValueError, match="has changed since base-000000 was written"):
        first.write()
    return _names(folder)


def test_one_writer_at_a_time(run_ranks, tmp_path):
    assert run_ranks(1, _others, tmp_path / "chain") == [["base-000000", "base-000001"]]


def _refused(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    checkpoint.save(folder, model)
    with pytest.raises(ValueError, match="is the folder of a checkpoint"):
        checkpoint.DeltaWriter(model, folder)
    with pytest.raises(ValueError, match="different arguments: folder"):
        checkpoint.DeltaWriter(model, folder.parent / f"chain-{rank}").write()
    with pytest.raises(ValueError, match="different arguments: base"):
        checkpoint.DeltaWriter(model, folder.parent / "chain").write(base=rank == 0)


def test_refused_folders(run_ranks, tmp_path):
    run_ranks(2, _refused, tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]


def _fail(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    writer = checkpoint.DeltaWriter(model, folder)
    train(model, rank, device, range(2))
    writer.write()
    before = checkpoint.digest(model)
    train(model, rank, device, range(2, 4))
    if rank == 0:
        (folder / ".delta-000001.saving").write_text("in the way")
    with pytest.raises(ValueError, match="is a file"):
        writer.write()
    if rank == 0:
        (folder / ".delta-000001.saving").unlink()
    train(model, rank, device, range(4, 5))
    return before, writer.write().name, checkpoint.digest(model)


@pytest.mark.slow
def test_a_write_that_fails(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    before, name, after = run_ranks(2, _fail, folder)[0]
    assert name == "base-000001"
    assert run_ranks(2, _digest, folder / "base-000000") == [before] * 2
    assert run_ranks(2, _digest, folder) == [after] * 2


def _name(folder, number):
    """Has deltas.json name an older checkpoint as the newest."""
    chain = Chain(folder)
    older = folder / chain.names()[number]
    chain.name_newest(Link.read(older), digest_of(older))


def _compacted(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    checkpoint.load(folder, model, model.fused_optimizer)
    return (
        checkpoint.digest(model),
        model_contents(model, "adam"),
        train(model, rank, device, range(3)),
    )


@pytest.mark.slow
def test_compact(run_ranks, tmp_path, device_type):
    folder = tmp_path / "chain"
    run_ranks(2, _steps, folder, {"every_steps": 2})
    wanted = run_ranks(2, _compacted, folder)
    merged = checkpoint.compact(folder, tmp_path / "merged", batch_bytes=1 << 16)
    assert_same(run_ranks(2, _compacted, merged), wanted, device_type)
    third = run_ranks(2, _compacted, folder / "delta-000002")
    again = checkpoint.compact(folder / "delta-000002", merged)
    assert_same(run_ranks(2, _compacted, again), third, device_type)
    with pytest.raises(ValueError, match="is not the newest checkpoint of its chain: pass into"):
        checkpoint.compact(folder / "delta-000002")
    base = checkpoint.compact(folder)
    assert base == folder / "base-000004"
    assert checkpoint.compact(folder) == base
    assert_same(run_ranks(2, _compacted, folder), wanted, device_type)
    for name in ("base-000000", "delta-000001", "delta-000002", "delta-000003"):
        shutil.rmtree(folder / name)
    assert_same(run_ranks(2, _compacted, folder), wanted, device_type)


@pytest.mark.slow
def test_compact_what_a_killed_writer_did_not_name(run_ranks, tmp_path, device_type):
    folder = tmp_path / "chain"
    run_ranks(1, _steps, folder, {"every_steps": 2})
    wanted = run_ranks(1, _compacted, folder)
    for name in ("base-000004", "base-000004"):
        _name(folder, 2)  # as after a kill between the checkpoint's rename and its naming
        assert checkpoint.compact(folder) == folder / name
        assert_same(run_ranks(1, _compacted, folder), wanted, device_type)


def test_compact_refuses(run_ranks, tmp_path):
    with pytest.raises(ValueError, match="There is no chain of deltas at"):
        checkpoint.compact(tmp_path / "none", tmp_path / "merged")
    folder = tmp_path / "chain"
    run_ranks(1, _steps, folder, {"every_steps": 4})
    shard = next(path for path in (folder / "base-000000").rglob("shard*") if path.is_file())
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=f"{shard} is damaged"):
        checkpoint.compact(folder, tmp_path / "merged")
    with pytest.raises(ValueError, match="is not a checkpoint and would be replaced"):
        checkpoint.compact(folder / "base-000000", folder)
    assert os.listdir(tmp_path) == ["chain"]
