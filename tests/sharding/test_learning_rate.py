"""A learning rate scheduler affects tables on backends like stock tables."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.backends import BACKENDS
from tests.support.models import make_model, shard_model
from tests.support.small_models import batch
from torchrec_hkv import ParameterConstraints

RATES = [0.4, 0.2, 0.1]


def _steps(rank, world_size, device, backend):
    """A row's change in each step: with SGD and a constant gradient it shows the learning rate."""
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=64, embedding_dim=4, feature_names=[f])
        for n, f in (("t", "f"), ("s", "g"))
    ]
    constraints = {
        name: ParameterConstraints(compute_kernels=[kernel], sharding_types=["row_wise"])
        for name, kernel in (("t", backend), ("s", "fused"))
    }
    model = shard_model(
        make_model(tables, torch.optim.SGD, {"lr": RATES[0]}), constraints, world_size, device
    )
    optimizer = model.fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    features = batch(rank, device, seed=0)
    features = type(features)(
        keys=["f", "g"],
        values=torch.tensor([7, 7], device=device),
        lengths=torch.ones(2, dtype=torch.int64, device=device),
    )
    seen = []
    for _ in range(len(RATES) + 1):
        optimizer.zero_grad()
        output = model(features)
        seen.append(output.detach().cpu())
        output.sum().backward()
        optimizer.step()
        scheduler.step()
    return torch.stack(seen).diff(dim=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_schedulers_work(run_ranks, backend):
    for moved in run_ranks(2, _steps, backend):
        for step, rate in zip(moved, RATES, strict=True):
            torch.testing.assert_close(step, torch.full_like(step, -rate))
