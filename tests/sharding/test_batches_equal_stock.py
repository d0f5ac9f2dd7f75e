"""Batches of any shape train tables of a backend like stock tables: equal losses and rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.pairwise import pairwise
from tests.support.stock_comparison import Scenario, train_with_stock
from tests.support.stock_support import skip_unsupported_by_stock

pytestmark = pytest.mark.compat


def _lacks_backward(device_type, sharding_type, world_size):
    """Gloo refuses the uneven all_gather of TorchRec's backward, also for stock tables."""
    return device_type == "cpu" and sharding_type == "row_wise" and world_size > 1


def _train(run_ranks, world_size, scenario):
    with skip_unsupported_by_stock():
        return run_ranks(world_size, train_with_stock, scenario)


def _check(outcomes):
    for outcome in outcomes:
        stock, backend_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "pooling", "sharding_type", "world_size"),
    pairwise(BACKENDS, ["sum", "mean", "weighted"], ["row_wise", "table_wise"], [1, 2]),
)
def test_batch_sizes_of_features(
    run_ranks, device_type, backend, pooling, sharding_type, world_size
):
    trained = not _lacks_backward(device_type, sharding_type, world_size)
    scenario = Scenario(backend, sharding_type, pooling, "sgd", batches="variable", trained=trained)
    _check(_train(run_ranks, world_size, scenario))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("sharding_type", "pooling"),
    [
        ("row_wise", "sum"),
        ("row_wise", "weighted"),
        # For stock tables, TorchRec's divisor of a row-wise mean refuses a batch without samples.
        ("table_wise", "sum"),
        ("table_wise", "mean"),
        ("table_wise", "weighted"),
    ],
)
def test_ranks_without_samples(run_ranks, device_type, pooling, sharding_type, world_size):
    trained = not _lacks_backward(device_type, sharding_type, world_size)
    scenario = Scenario(
        "hkv", sharding_type, pooling, "rowwise_adagrad", batches="absent", trained=trained
    )
    _check(_train(run_ranks, world_size, scenario))


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_32_bits_on_one_rank(run_ranks, backend, sharding_type):
    scenario = Scenario(backend, sharding_type, "sum", "rowwise_adagrad", narrow=True)
    _check(run_ranks(2, train_with_stock, scenario))
