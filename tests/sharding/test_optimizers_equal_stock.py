"""Every optimizer of stock ``fused`` tables trains ours the same: equal losses and rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.stock_comparison import (
    GPU_OPTIMIZERS,
    MORE_OPTIMIZERS,
    Scenario,
    train_with_stock,
)
from tests.support.stock_support import skip_unsupported_by_stock


@pytest.mark.parametrize("optimizer", [*MORE_OPTIMIZERS, *GPU_OPTIMIZERS])
@pytest.mark.parametrize(
    ("sharding_type", "pooling"), [("row_wise", "sum"), ("table_wise", "mean")]
)
def test_equal_to_stock(run_ranks, device_type, optimizer, sharding_type, pooling):
    if optimizer in GPU_OPTIMIZERS and device_type == "cpu":
        pytest.skip("stock tables have this optimizer on GPUs only")
    scenario = Scenario("hkv", sharding_type, pooling, optimizer)
    with skip_unsupported_by_stock():
        outcomes = run_ranks(2, train_with_stock, scenario)
    for outcome in outcomes:
        stock, backend_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)
