"""Under every sharding type, tables of a backend equal stock tables: the same losses and rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.pairwise import pairwise
from tests.support.stock_comparison import OPTIMIZERS, Scenario, train_with_stock

pytestmark = pytest.mark.compat

#: Ranks, and ranks per host.
HOSTS = [(1, 1), (2, 2), (4, 2)]
TYPES = ["column_wise", "table_row_wise", "table_column_wise", "grid_shard"]


def _check(outcomes):
    for outcome in outcomes:
        stock, backend_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooling", "sharding_type", "ranks"),
    pairwise(
        ["sum", "mean", "weighted"],
        TYPES,
        HOSTS,
        # TorchRec returns sums; test_torchrec_tests.py compares with true means.
        allowed=lambda pooling, type_, _: (pooling, type_) != ("mean", "grid_shard"),
    ),
)
def test_equal_to_stock(run_ranks, pooling, sharding_type, ranks):
    world_size, host_size = ranks
    scenario = Scenario("hkv", sharding_type, pooling, "rowwise_adagrad")
    _check(run_ranks(world_size, train_with_stock, scenario, host_size=host_size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "optimizer", "sharding_type"), pairwise(BACKENDS, OPTIMIZERS, TYPES)
)
def test_backends_and_optimizers(run_ranks, backend, optimizer, sharding_type):
    scenario = Scenario(backend, sharding_type, "sum", optimizer)
    _check(run_ranks(2, train_with_stock, scenario, host_size=1))
