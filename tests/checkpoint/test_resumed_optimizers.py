"""A resumed run equals an uninterrupted one: with schedulers, with optimizers without states, and
with optimizers that have made no step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.support.models import make_model, shard_model
from tests.support.small_models import batch
from torchrec_hkv import ParameterConstraints, TTOptions, checkpoint

pytestmark = pytest.mark.compat


def _make(world_size, device, sharding_type="row_wise", backend="hkv"):
    """SGD, which has no state, trains stock table ``s``."""
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=256, embedding_dim=4, feature_names=["f"]),
        EmbeddingBagConfig(name="s", num_embeddings=16, embedding_dim=4, feature_names=["g"]),
    ]
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=["table_wise" if kernel == "tt" else sharding_type],
            options=TTOptions(ranks=2) if kernel == "tt" else None,
        )
        for name, kernel in (("t", backend), ("s", "fused"))
    }
    model = shard_model(
        make_model(tables, torch.optim.SGD, {"lr": 0.1}), constraints, world_size, device
    )
    torch.manual_seed(1)
    linear = nn.Linear(8, 1, device=device)
    dense = KeyedOptimizerWrapper(
        {f"over.{name}": parameter for name, parameter in linear.named_parameters()},
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
    return model, linear, optimizer


def _train(model, linear, optimizer, schedule, rank, device, steps):
    losses = []
    for step in steps:
        features = batch(rank, device, seed=step)
        features.values().clamp_(0, 15)  # row numbers, which are valid for every kind of table
        optimizer.zero_grad()
        loss = linear(model(features)).square().sum()
        loss.backward()
        for parameter in linear.parameters():
            dist.all_reduce(parameter.grad)  # DDP replicates dense parameters
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses) if losses else None


def _resume(rank, world_size, device, folder, backend, before):
    """Losses of an uninterrupted run, and of one that resumes from its checkpoint."""
    model, linear, optimizer = _make(world_size, device, backend=backend)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    _train(model, linear, optimizer, schedule, rank, device, range(before))
    checkpoint.save(folder, model, optimizer)
    fresh, fresh_linear, fresh_optimizer = _make(world_size, device, backend=backend)
    fresh_schedule = torch.optim.lr_scheduler.ExponentialLR(fresh_optimizer, 0.7)
    checkpoint.load(folder, fresh, fresh_optimizer)
    fresh_schedule.load_state_dict(schedule.state_dict())
    fresh_linear.load_state_dict(linear.state_dict())  # outside of the sharded model
    steps = range(before, before + 3)
    return (
        _train(model, linear, optimizer, schedule, rank, device, steps),
        _train(fresh, fresh_linear, fresh_optimizer, fresh_schedule, rank, device, steps),
    )


@pytest.mark.parametrize("backend", ["hkv", "tt"])
@pytest.mark.parametrize("before", [0, 3])
def test_goes_on_as_an_unbroken_run(run_ranks, tmp_path, backend, before):
    # A rank without a shard of a table lacks some of the checkpoint's tensors.
    for unbroken, resumed in run_ranks(2, _resume, tmp_path / "c", backend, before):
        torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


def _save(rank, world_size, device, folder):
    model, _, optimizer = _make(world_size, device)
    for group, rate in zip(optimizer.param_groups, (0.25, 0.25, 0.125), strict=True):
        group["lr"] = rate
    checkpoint.save(folder, model, optimizer)


def _load(rank, world_size, device, folder):
    model, _, optimizer = _make(world_size, device, "table_wise")
    tensor = torch.tensor(0.5)
    optimizer.param_groups[-1]["lr"] = tensor
    checkpoint.load(folder, model, optimizer)
    assert optimizer.param_groups[-1]["lr"] is tensor
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_learning_rates_go_with_their_parameters(run_ranks, tmp_path):
    run_ranks(1, _save, tmp_path / "c")
    for *of_tables, dense in run_ranks(2, _load, tmp_path / "c"):
        assert set(of_tables) == {0.25}
        assert dense == 0.125
