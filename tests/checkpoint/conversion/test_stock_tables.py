"""Stock tables that torch.distributed.checkpoint saved convert to hash tables and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import features, make_tables
from tests.support.conversions import converted, entries_of
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert

KINDS = {"lru": "fused", "lfu": "fused"}
NAME = "ebc.embedding_bags.lru"
SUMS = f"state.{NAME}.weight.lru.momentum1"


def _stock(world_size, device):
    return make_tables(world_size, device, "row_wise", "adagrad", rows=100, kinds=KINDS)


def _train(model, rank, device, steps):
    outputs = []
    for step in steps:
        batch = features(device, 1000 * rank + step, 60, names=())
        output = model(batch)
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return torch.cat(outputs)


def _state(model, *, nested=True):
    if not nested:
        return model.state_dict()
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _whole(tensor, rank, device):
    """The whole of a sharded tensor, in host memory; None on all ranks but 0."""
    whole = torch.zeros(tensor.size(), device=device) if rank == 0 else None
    tensor.gather(out=whole)
    return None if whole is None else whole.cpu()


def _save(rank, world_size, device, path, nested):
    model = _stock(world_size, device)
    _train(model, rank, device, range(5))
    dcp.save(_state(model, nested=nested), checkpoint_id=path)
    state = _state(model)
    weight = _whole(state["model"][f"{NAME}.weight"], rank, device)
    sums = _whole(state["optimizer"]["state"][f"{NAME}.weight"]["lru.momentum1"], rank, device)
    return weight, sums, _train(model, rank, device, range(9, 12))


def _go_on(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", "adagrad", rows=200, seed=0)
    lost = checkpoint.load(path, model, model.fused_optimizer)
    return lost, _train(model, rank, device, range(9, 12))


def test_training_goes_on_as_that_of_the_stock_table(run_ranks, tmp_path):
    stock = run_ranks(2, _save, tmp_path / "stock", True)
    weight, sums, _ = stock[0]
    saved = converted(tmp_path / "stock", tmp_path / "hkv", tables=["lru", "lfu"])
    found = entries_of(saved, "lru")
    assert len(saved.hash_table("lru").parts) > 1
    assert found["ids"].equal(torch.arange(100))
    assert found["rows"].equal(weight)
    assert found["states"][:, :12].equal(sums)
    for (*_, outputs), (lost, others) in zip(
        stock, run_ranks(2, _go_on, tmp_path / "hkv"), strict=True
    ):
        assert lost == 0
        torch.testing.assert_close(others, outputs)


@pytest.mark.parametrize("nested", [True, False])
def test_back_to_stock(run_ranks, tmp_path, nested):
    (weight, sums, _), _ = run_ranks(2, _save, tmp_path / "stock", nested)
    converted(tmp_path / "stock", tmp_path / "hkv", tables=["lru"])
    key = {} if nested else {"model_key": ""}
    convert(tmp_path / "hkv", tmp_path / "back", ConversionOptions(batch_bytes=8 << 10, **key))
    results = run_ranks(2, _load_stock, tmp_path / "back", nested)
    assert results[0][0].equal(weight)
    if nested:
        assert results[0][1].equal(sums)


def _load_stock(rank, world_size, device, path, nested):
    model = _stock(world_size, device)
    state = _state(model, nested=nested)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"] if nested else state)
    weight = model.state_dict()[f"{NAME}.weight"]
    state = model.fused_optimizer.state_dict()["state"]
    sums = state[f"{NAME}.weight"]["lru.momentum1"]
    return _whole(weight, rank, device), _whole(sums, rank, device)
