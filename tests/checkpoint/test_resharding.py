"""A checkpoint loads bit for bit at any number of ranks and under any sharding type."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import evaluate, joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.optimizers import optimizer_state

STEPS = range(12)


def _state(model):
    # A rank without a shard of the stock table has no fused optimizer state.
    return {"model": model.state_dict(), **optimizer_state(model.fused_optimizer)}


def _save(rank, world_size, device, sharding_type, optimizer, folder, plain=False):
    model = make_tables(world_size, device, sharding_type, optimizer)
    train(model, rank, device, STEPS)
    if plain:
        dcp.save(_state(model), checkpoint_id=folder)
    else:
        checkpoint.save(folder, model, model.fused_optimizer)
    return model_contents(model, optimizer), checkpoint.digest(model), evaluate(model, device)


def _load(rank, world_size, device, sharding_type, optimizer, folder, plain=False):
    model = make_tables(world_size, device, sharding_type, optimizer)
    train(model, rank, device, range(50, 52))  # the load replaces this content
    if plain:
        state = _state(model)
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            model.fused_optimizer.load_state_dict(state["optimizer"])
    else:
        assert checkpoint.load(folder, model, model.fused_optimizer) == 0
    result = model_contents(model, optimizer), checkpoint.digest(model), evaluate(model, device)
    train(model, rank, device, range(2))
    return result


def _check(saved, loaded):
    before, after = (joined([values for values, *_ in results]) for results in (saved, loaded))
    assert len(before) > 1000
    assert after == before
    digests = {str(sorted(digest.items())) for _, digest, _ in [*saved, *loaded]}
    assert len(digests) == 1
    for *_, outputs in loaded:
        torch.testing.assert_close(outputs, saved[0][2], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saver", "sharding_type", "loader", "other"),
    [
        ((1, 1), "table_wise", (3, 3), "row_wise"),
        ((2, 2), "row_wise", (1, 1), "row_wise"),
        ((2, 2), "row_wise", (3, 3), "column_wise"),
        ((3, 3), "column_wise", (2, 2), "row_wise"),
        ((4, 2), "table_row_wise", (2, 2), "table_column_wise"),
        ((4, 2), "grid_shard", (3, 3), "row_wise"),
        ((2, 2), "column_wise", (4, 2), "grid_shard"),
        ((3, 3), "row_wise", (4, 2), "table_row_wise"),
        ((8, 8), "row_wise", (3, 3), "table_wise"),
        ((4, 2), "row_wise", (8, 8), "row_wise"),
    ],
)
def test_other_ranks_and_types(run_ranks, tmp_path, saver, sharding_type, loader, other):
    arguments = ("adam", tmp_path / "checkpoint")
    saved = run_ranks(saver[0], _save, sharding_type, *arguments, host_size=saver[1])
    loaded = run_ranks(loader[0], _load, other, *arguments, host_size=loader[1])
    _check(saved, loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saver", "sharding_type", "loader", "other"),
    [
        ((2, 2), "row_wise", (2, 2), "row_wise"),
        ((3, 3), "column_wise", (3, 3), "column_wise"),
        ((1, 1), "row_wise", (3, 3), "row_wise"),
        ((3, 3), "row_wise", (2, 2), "column_wise"),
        ((4, 2), "grid_shard", (3, 3), "row_wise"),
    ],
)
def test_plain_distributed_checkpoint(run_ranks, tmp_path, saver, sharding_type, loader, other):
    arguments = ("adam", tmp_path / "checkpoint", True)
    saved = run_ranks(saver[0], _save, sharding_type, *arguments, host_size=saver[1])
    loaded = run_ranks(loader[0], _load, other, *arguments, host_size=loader[1])
    _check(saved, loaded)
