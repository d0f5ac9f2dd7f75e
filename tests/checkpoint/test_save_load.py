"""``torchrec_hkv.checkpoint``: all ranks save and load a model and its optimizers."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.support.backends import BACKENDS
from tests.support.small_models import batch, make_small, outputs_and_train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint import model_save


def _optimizers(model, device):
    """The model's fused optimizer, and a dense one whose first step makes its states."""
    torch.manual_seed(1)
    linear = nn.Linear(8, 1, device=device)
    dense = KeyedOptimizerWrapper(
        {f"over.{name}": parameter for name, parameter in linear.named_parameters()},
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5),
    )
    return linear, CombinedOptimizer([model.fused_optimizer, dense])


def _losses(model, linear, optimizer, rank, device, seed):
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = linear(model(batch(rank, device, seed + step))).square().sum()
        loss.backward()
        for parameter in linear.parameters():
            dist.all_reduce(parameter.grad)  # DDP replicates dense parameters
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _go_on(rank, world_size, device, backend, sharding_type, folder):
    saved = make_small(world_size, device, backend, sharding_type)
    saved_linear, saved_optimizer = _optimizers(saved, device)
    _losses(saved, saved_linear, saved_optimizer, rank, device, seed=0)
    checkpoint.save(folder, saved, saved_optimizer)
    fresh = make_small(world_size, device, backend, sharding_type)
    linear, optimizer = _optimizers(fresh, device)
    checkpoint.load(folder, fresh, optimizer)
    linear.load_state_dict(saved_linear.state_dict())  # outside of the sharded model
    torch.testing.assert_close(
        _losses(fresh, linear, optimizer, rank, device, seed=7),
        _losses(saved, saved_linear, saved_optimizer, rank, device, seed=7),
        rtol=0,
        atol=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_as_before(run_ranks, backend, sharding_type, world_size, tmp_path):
    folder = tmp_path / "new" / "checkpoint"
    run_ranks(world_size, _go_on, backend, sharding_type, folder)
    assert os.listdir(folder.parent) == ["checkpoint"]


def _save(rank, world_size, device, folder, steps):
    model = make_small(world_size, device, "toy")
    outputs_and_train(model, rank, device, steps)
    checkpoint.save(folder, model)
    return outputs_and_train(model, rank, device, steps=1).cpu()


def _load(rank, world_size, device, folder):
    model = make_small(world_size, device, "toy")
    checkpoint.load(folder, model)
    return outputs_and_train(model, rank, device, steps=1).cpu()


def _killed(rank, world_size, device, folder):
    model = make_small(world_size, device, "toy")
    outputs_and_train(model, rank, device, steps=5)
    if rank == 1:
        # This rank dies once the others have begun to write.
        model_save.save_tensors = lambda *args, **kwargs: os._exit(9)
    checkpoint.save(folder, model)


@pytest.mark.slow
def test_a_killed_save_leaves_the_last_good_one(run_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    saved = run_ranks(2, _save, folder, 2)
    with pytest.raises(RuntimeError):
        run_ranks(2, _killed, folder)
    loaded = run_ranks(2, _load, folder)
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    newer = run_ranks(2, _save, folder, 4)
    torch.testing.assert_close(run_ranks(2, _load, folder), newer, rtol=0, atol=0)


@pytest.mark.slow
def test_a_save_killed_while_it_is_put_in_place_leaves_the_last_good_one(run_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    saved = run_ranks(2, _save, folder, 2)
    folder.rename(tmp_path / ".checkpoint.previous")
    torch.testing.assert_close(run_ranks(2, _load, folder), saved, rtol=0, atol=0)
    newer = run_ranks(2, _save, folder, 4)
    torch.testing.assert_close(run_ranks(2, _load, folder), newer, rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["checkpoint"]


def _refused(rank, world_size, device, folder, rows, sharding_type):
    model = make_small(world_size, device, "toy", sharding_type=sharding_type, rows=rows)
    outputs_and_train(model, rank, device, steps=1)
    before = model.eval()(batch(rank, device, seed=0))
    with pytest.raises(ValueError, match=r"checkpoint") as refusal:
        checkpoint.load(folder, model)
    torch.testing.assert_close(model(batch(rank, device, seed=0)), before, rtol=0, atol=0)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("world_size", "rows", "sharding_type", "message"),
    [
        (3, 256, "row_wise", "holds table 't' in 2 shards and the model has 3"),
        (2, 256, "table_wise", "holds table 't' in 2 shards and the model has 1"),
        (2, 128, "row_wise", "has shape"),
    ],
)
def test_what_does_not_match_is_refused(
    run_ranks, tmp_path, world_size, rows, sharding_type, message
):
    folder = tmp_path / "checkpoint"
    run_ranks(2, _save, folder, 2)
    for refusal in run_ranks(world_size, _refused, folder, rows, sharding_type):
        assert message in refusal


def _refused_paths(rank, world_size, device, folder):
    model = make_small(world_size, device, "toy")
    messages = []
    for work in (
        lambda: checkpoint.load(folder / "none", model),
        lambda: checkpoint.save(folder, model),
        lambda: checkpoint.save(folder / "x", model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"checkpoint|optimizer") as refusal:
            work()
        messages.append(str(refusal.value))
    return messages


def test_paths_and_optimizers_of_no_use_are_refused_on_every_rank(run_ranks, tmp_path):
    for missing, occupied, optimizer in run_ranks(2, _refused_paths, tmp_path):
        assert "There is no checkpoint at" in missing
        assert "is not a checkpoint and would be replaced" in occupied
        assert "must be a KeyedOptimizer" in optimizer
