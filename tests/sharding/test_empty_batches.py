"""Batches without ids, on some ranks or on all."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.support.backends import BACKENDS
from tests.support.small_models import BATCH, batch, make_small


def _empty(device):
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.empty(0, dtype=torch.int64, device=device),
        lengths=torch.zeros(2 * BATCH, dtype=torch.int64, device=device),
    )


def _train(rank, world_size, device, backend, sharding_type):
    model = make_small(world_size, device, backend, sharding_type)
    for silent in ({0}, {1}, {0, 1}):
        features = _empty(device) if rank in silent else batch(rank, device, seed=0)
        output = model(features)
        output.square().sum().backward()
        if rank in silent:
            torch.testing.assert_close(output, torch.zeros_like(output))
        else:
            assert output.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_batches_without_ids(run_ranks, backend, sharding_type):
    run_ranks(2, _train, backend, sharding_type)
