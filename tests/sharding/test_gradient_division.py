"""Gradients are divided by the number of ranks exactly where TorchRec divides them."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from tests.support.stock_comparison import Scenario, train_with_stock

pytestmark = pytest.mark.compat

SCENARIO = Scenario("hkv", "row_wise", "sum", "sgd")


def _trained(rank, world_size, device, is_divided):
    before = get_gradient_division()
    set_gradient_division(is_divided)
    try:
        return train_with_stock(rank, world_size, device, SCENARIO)
    finally:
        set_gradient_division(before)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_divided", [False, True])
def test_as_with_stock_tables(run_ranks, ranks, is_divided):
    outcomes = run_ranks(ranks, _trained, is_divided)
    stock, backend_losses = torch.stack([outcome.losses for outcome in outcomes]).unbind(2)
    torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-6)


def test_it_matters(run_ranks):
    divided, whole = (
        torch.stack([outcome.losses for outcome in run_ranks(2, _trained, is_divided)])
        for is_divided in (True, False)
    )
    assert (divided - whole).abs().max() > 1e-2
