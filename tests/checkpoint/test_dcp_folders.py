"""checkpoint.load loads hash tables and stock tables that torch.distributed.checkpoint saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import features, joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.cli import main

STOCK = {"lru": "fused", "lfu": "fused"}


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(3))
    dcp.save(model.state_dict(), checkpoint_id=folder / "plain")
    checkpoint.save(folder / "ours", model)
    return model_contents(model, "adam")


def _load(rank, world_size, device, folder, sharding_type):
    model = make_tables(world_size, device, sharding_type)
    train(model, rank, device, range(20, 22))
    with pytest.raises(ValueError, match=r"name .*ours") as refusal:
        checkpoint.load(folder / "ours" / "tensors", model)
    assert str(refusal.value).endswith(f"name {folder / 'ours'}.")
    with pytest.raises(ValueError, match="has no optimizer"):
        checkpoint.load(folder / "plain", model, model.fused_optimizer)
    checkpoint.load(folder / "plain", model)
    return model_contents(model, "adam")


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "sharding_type"), [(3, "row_wise"), (2, "column_wise")])
def test_hash_tables(run_ranks, tmp_path, capsys, world_size, sharding_type):
    before = run_ranks(2, _save, tmp_path)
    after = run_ranks(world_size, _load, tmp_path, sharding_type)
    assert joined(before) == joined(after)
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path / "plain")])
    assert stopped.value.code == 2
    assert "torchrec-hkv convert" in capsys.readouterr().err


def _stock_steps(model, rank, device, steps):
    outputs = []
    for step in steps:
        output = model(features(device, 1000 * rank + step, 60, names=()))
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return torch.cat(outputs)


def _save_stock(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", "adagrad", rows=150, kinds=STOCK)
    _stock_steps(model, rank, device, range(4))
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)
    return _stock_steps(model, rank, device, range(4, 7))


def _load_stock(rank, world_size, device, path, sharding_type):
    model = make_tables(world_size, device, sharding_type, "adagrad", rows=300)
    _stock_steps(model, rank, device, range(50, 52))
    small = make_tables(world_size, device, sharding_type, "adagrad", rows=140)
    digest = checkpoint.digest(small)
    with pytest.raises(ValueError, match="has 150 rows, but in the model num_embeddings is 140"):
        checkpoint.load(path, small)
    assert checkpoint.digest(small) == digest
    assert checkpoint.load(path, model, model.fused_optimizer) == 0
    return _stock_steps(model, rank, device, range(4, 7))


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
def test_stock_tables_into_hash_tables(run_ranks, tmp_path, sharding_type):
    stock = run_ranks(2, _save_stock, tmp_path / "stock")
    hashed = run_ranks(2, _load_stock, tmp_path / "stock", sharding_type)
    for expected, output in zip(stock, hashed, strict=True):
        torch.testing.assert_close(output, expected)


def _lacking(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad")
    train(model, rank, device, range(3))
    state = model.state_dict()
    kept = {key: value for key, value in state.items() if ".lfu." not in key}
    dcp.save(kept, checkpoint_id=folder / "part")
    other = make_tables(world_size, device, "row_wise", "adagrad")
    train(other, rank, device, range(7, 9))
    before = checkpoint.digest(other)
    with pytest.raises(ValueError, match=r"has no table 'ebc\.embedding_bags\.lfu'"):
        checkpoint.load(folder / "part", other)
    assert checkpoint.digest(other) == before
    checkpoint.load(folder / "part", other, strict=False)
    after, saved = checkpoint.digest(other), checkpoint.digest(model)
    lru, lfu = sorted(after, reverse=True)
    return after[lru] == saved[lru], after[lfu] == before[lfu] != saved[lfu]


def test_what_a_folder_lacks(run_ranks, tmp_path):
    assert run_ranks(2, _lacking, tmp_path) == [(True, True)] * 2
