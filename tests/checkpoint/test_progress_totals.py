"""Every save, load and delta announces its total amount of work, and has done all of it at the
end."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import HashTable, checkpoint
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert
from torchrec_hkv.progress import reported


@contextlib.contextmanager
def _whole():
    """Checks that the total is announced and reached."""
    with reported("All", show=False) as task:
        yield
    assert task.total > 0
    assert task.done == task.total


def _totals(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad")
    train(model, rank, device, range(4))
    with _whole():
        checkpoint.save(folder / "whole", model)
    with _whole():
        checkpoint.load(folder / "whole", model)
    writer = checkpoint.DeltaWriter(model, folder / "chain")
    with _whole():
        writer.write()
    train(model, rank, device, range(4, 6))
    with _whole():
        writer.write()
    return True


def test_checkpoints(run_ranks, tmp_path):
    assert run_ranks(2, _totals, tmp_path) == [True, True]


def test_hash_table(tmp_path):
    table = HashTable(4, 1000, state_dim=2)
    table.insert_or_assign(torch.arange(500), torch.randn(500, 4))
    with _whole():
        table.save(tmp_path / "table")
    with _whole():
        table.load(tmp_path / "table")


def test_conversions(tmp_path):
    state = {"ebc.embedding_bags.user.weight": torch.randn(500, 4), "bias": torch.randn(3)}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    for source, into in (("stock", "hkv"), ("hkv", "back"), ("hkv", "rows.safetensors")):
        with _whole():
            convert(tmp_path / source, tmp_path / into, ConversionOptions())
