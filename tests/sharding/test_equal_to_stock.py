"""Tables of a backend equal stock ``fused`` tables: the same losses and rows over 20 steps."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.pairwise import pairwise
from tests.support.stock_comparison import OPTIMIZERS, Scenario, train_with_stock


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "optimizer", "pooling", "sharding_type", "world_size"),
    pairwise(
        BACKENDS, OPTIMIZERS, ["sum", "mean", "weighted"], ["row_wise", "table_wise"], [1, 2, 3]
    ),
)
def test_equal_to_stock(run_ranks, backend, optimizer, pooling, sharding_type, world_size):
    scenario = Scenario(backend, sharding_type, pooling, optimizer, steps=20)
    for outcome in run_ranks(world_size, train_with_stock, scenario):
        stock, backend_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)
