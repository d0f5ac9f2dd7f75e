"""A model is exported from a checkpoint and the module before sharding, without a process group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torchrec import PoolingType

from tests.support.processes import run_python
from tests.support.served_models import (
    SEEDS,
    ServedModel,
    make_served,
    outputs_of,
    random_batch,
    train,
)
from torchrec_hkv import checkpoint, serving

#: Runs where no process group was made, and no model was sharded.
EXPORT = """
import sys, torch
from tests.support.served_models import ServedModel, random_batch
from torchrec_hkv import serving
with torch.device("meta"):
    model = ServedModel()
serving.export(model, sys.argv[2], inputs=random_batch(0), checkpoint=sys.argv[1])
assert not torch.distributed.is_initialized()
"""


def saved(rank, world_size, device, folder: Path, sharding: str):
    """Trains and saves; outputs of the trainer's evaluation."""
    model = make_served(world_size, device, sharding)
    train(model, 4)
    checkpoint.save(folder / "checkpoint", model)
    return [outputs_of(model, seed, 2 + seed) for seed in SEEDS]


def rows_saved(rank, world_size, device, folder: Path):
    """Trains and saves; ids and rows of three tables."""
    model = make_served(world_size, device)
    train(model, 4)
    checkpoint.save(folder / "checkpoint", model)
    found = {}
    for name in ("user", "country", "ebc.embedding_bags.pages"):
        batches = list(checkpoint.export_rows(model, name))
        found[name] = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    return found


def assert_served(model, want, near: float = 0.0):
    for seed, its in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        for key, value in its.items():
            torch.testing.assert_close(got[key], value, rtol=near, atol=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "ranks", "near"),
    # Where ranks sum their parts of a bag, the trainer's order of a sum is another.
    [("table_wise", 1, 0.0), ("column_wise", 2, 0.0), ("row_wise", 2, 1e-6)],
)
def test_exported(sharding, ranks, near, run_ranks, tmp_path):
    want = run_ranks(ranks, saved, tmp_path, sharding)[0]
    (script := tmp_path / "export.py").write_text(EXPORT)
    paths = [str(tmp_path / "checkpoint"), str(tmp_path / "model")]
    done = run_python([str(script), *paths], os.environ)
    assert done.returncode == 0, done.stderr
    model = serving.load(tmp_path / "model", verify=True)
    assert_served(model, want, near)
    assert model.counters()["ebc.embedding_bags.user"]["unknown"] > 0


@pytest.mark.slow
def test_formats_and_unknown(run_ranks, tmp_path):
    want = run_ranks(1, rows_saved, tmp_path)[0]
    rows = {"user": "int8", "country": "fp16", "ebc.embedding_bags.pages": "fp32"}
    serving.export(
        ServedModel(),
        tmp_path / "model",
        rows,
        inputs=random_batch(0),
        checkpoint=tmp_path / "checkpoint",
        unknown={"user": "zero", "likes": [0.5] * 12},
        memory_bytes=1000,  # through temporary files
    )
    model = serving.load(tmp_path / "model")
    tables = model._version.tables
    formats = {table.name: table.row_format for table in tables.tables}
    assert formats["ebc.embedding_bags.item"] == "fp32"
    for name, (ids, its) in want.items():
        full = "ebc.embedding_bags." + name.rpartition(".")[2]
        assert formats[full] == rows[name]
        got = tables.rows(tables.names[full], ids)
        near = {"int8": 4e-3, "fp16": 1e-3, "fp32": 0.0}[rows[name]]
        torch.testing.assert_close(got, its, rtol=near, atol=near)
    missing = torch.tensor([10**15])
    number = tables.names["ebc.embedding_bags.user"]
    assert torch.equal(tables.rows(number, missing), torch.zeros(1, 12))
    number = tables.names["weighted.embedding_bags.likes"]
    assert torch.equal(tables.rows(number, missing), torch.full((1, 12), 0.5))


def chained(rank, world_size, device, folder: Path):
    model = make_served(world_size, device)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    train(model, 3)
    writer.write()
    train(model, 2, seed=500)
    writer.write()
    return [outputs_of(model, seed, 2 + seed) for seed in SEEDS]


@pytest.mark.slow
def test_base_of_a_chain(run_ranks, tmp_path):
    """Following starts after the base that was exported."""
    want = run_ranks(1, chained, tmp_path)[0]
    chain = tmp_path / "chain"

    def export(folder: Path) -> None:
        serving.export(ServedModel(), tmp_path / "model", inputs=random_batch(0), checkpoint=folder)

    with pytest.raises(ValueError, match="a chain of deltas: name its newest base"):
        export(chain)
    with pytest.raises(ValueError, match="a delta, which lacks most rows"):
        export(chain / "delta-000001")
    assert not (tmp_path / "model").exists()
    export(chain / "base-000000")
    model = serving.load(tmp_path / "model")
    follower = serving.follow(model, chain, every=None)
    assert model.freshness().number == 1
    assert follower._previous is not None  # of the export: the base was not read again
    assert_served(model, want)


def refused(rank, world_size, device, folder: Path):
    model = make_served(world_size, device)
    checkpoint.save(folder / "checkpoint", model)

    def export(served, **arguments):
        arguments = {"checkpoint": folder / "checkpoint", **arguments}
        serving.export(served, folder / "model", inputs=random_batch(0), **arguments)

    with pytest.raises(ValueError, match="is sharded: with checkpoint=, give the module before"):
        export(model)
    with pytest.raises(ValueError, match="deltas and checkpoint are both given"):
        export(ServedModel(), deltas=folder)
    with pytest.raises(ValueError, match=r"no-such/checkpoint\.json can't be read"):
        export(ServedModel(), checkpoint=folder / "no-such")
    other = ServedModel()
    other.over = torch.nn.Linear(8 + 88 + 52 + 24, 4)
    with pytest.raises(ValueError, match=r"'over\.weight' has shape \(3, 172\) in"):
        export(other)
    other = ServedModel()
    other.weighted.embedding_bag_configs()[0].pooling = PoolingType.MEAN
    with pytest.raises(
        ValueError, match=r"'weighted\.embedding_bags\.likes' has means of weighted"
    ):
        export(other)
    other = ServedModel()
    other.more = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has no tensor 'more\.weight': it is of another model"):
        export(other)
    other = ServedModel()
    other.ebc.embedding_bag_configs()[0].embedding_dim = 16
    with pytest.raises(ValueError, match=r"'ebc\.embedding_bags\.user' has 12 columns in"):
        export(other)
    other = ServedModel()
    other.register_buffer("scale", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="'scale' is on the meta device and has no values"):
        export(other)
    assert not (folder / "model").exists()


def test_refused(run_ranks, tmp_path):
    run_ranks(1, refused, tmp_path)


def damaged(rank, world_size, device, folder: Path):
    model = make_served(world_size, device)
    train(model, 2)
    checkpoint.save(folder / "checkpoint", model)
    path = next((folder / "checkpoint" / "tables").rglob("shard-*"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path.name}.*is damaged"):
        serving.export(
            ServedModel(),
            folder / "model",
            inputs=random_batch(0),
            checkpoint=folder / "checkpoint",
        )
    assert [entry.name for entry in folder.iterdir()] == ["checkpoint"]


def test_damaged(run_ranks, tmp_path):
    run_ranks(1, damaged, tmp_path)
