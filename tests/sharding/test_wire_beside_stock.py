"""An output exchange in 16 or 8 bits (``QCommsConfig``) serves ours as it does stock tables."""

from __future__ import annotations

import pytest
import torch

from tests.support.beside_stock import Scenario, train_beside_stock

pytestmark = pytest.mark.compat


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "sharding_type"),
    [
        ("fp16", "row_wise"),
        ("bf16", "row_wise"),
        ("fp8", "row_wise"),
        ("fp16", "table_wise"),
        # TorchRec's table-wise exchange gives its fp8 codec a tensor that that does not take.
        ("bf16", "table_wise"),
    ],
)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_as_with_stock_tables(run_ranks, run_ranks_once, pooling, sharding_type, wire):
    scenario = Scenario("hkv", sharding_type, pooling, "sgd", wire=wire)
    narrow = run_ranks(2, train_beside_stock, scenario)
    scenario = Scenario("hkv", sharding_type, pooling, "sgd")
    exact = run_ranks_once(2, train_beside_stock, scenario)
    stock, ours = torch.stack([outcome.losses for outcome in narrow]).unbind(2)
    full_stock, full_ours = torch.stack([outcome.losses for outcome in exact]).unbind(2)
    # Row sums are rounded on other ranks than those of stock tables: no farther off than stock
    # tables are from themselves in 32 bits, give or take.
    effect = (stock - full_stock).abs().max()
    assert 0 < effect < 0.02 * full_stock.max()
    assert (ours - full_ours).abs().max() > 0
    assert (ours - stock).abs().max() < 4 * effect
