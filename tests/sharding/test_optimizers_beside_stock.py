"""Every optimizer of stock ``fused`` tables trains ours the same: equal losses and rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.beside_stock import (
    GPU_OPTIMIZERS,
    MORE_OPTIMIZERS,
    Scenario,
    train_beside_stock,
)
from tests.support.stock_lacks import skip_what_stock_lacks


@pytest.mark.parametrize("optimizer", [*MORE_OPTIMIZERS, *GPU_OPTIMIZERS])
@pytest.mark.parametrize(
    ("sharding_type", "pooling"), [("row_wise", "sum"), ("table_wise", "mean")]
)
def test_equal_to_stock(run_ranks, device_type, optimizer, sharding_type, pooling):
    if optimizer in GPU_OPTIMIZERS and device_type == "cpu":
        pytest.skip("stock tables have this optimizer on GPUs only")
    scenario = Scenario("hkv", sharding_type, pooling, optimizer)
    with skip_what_stock_lacks():
        outcomes = run_ranks(2, train_beside_stock, scenario)
    for outcome in outcomes:
        stock, ours = outcome.losses.unbind(1)
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)
