"""Rows of 16 bits: of what float32 makes of the same row and state, the nearest value."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from tests.support.optimizer_cases import OPTIMIZERS
from tests.support.row_training import exact_gradients, make_group, read_rows

STEPS = 10


@pytest.mark.slow
@pytest.mark.parametrize("dim", [7, 64, 260])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_nearest(device_type, case, dtype, dim):
    names = random_ids(200).unique()
    narrow, wide = (
        make_group(OPTIMIZERS[case], dim, device_type, 2000, rows)
        for rows in (dtype, torch.float32)
    )
    everyone = Bags(names, torch.arange(len(names) + 1), len(names)).to(device_type)
    for _ in range(STEPS):
        for group in (narrow, wide):
            lookup(group, everyone)  # inserts
        before = read_rows(narrow, names)[0]
        assert wide.assign(everyone.ids, None, 1, before.float().to(device_type)).all()
        bags = Bags.random(1, 150, names).to(device_type)
        grad = exact_gradients(bags.batch_size, dim).to(device_type)
        for group in (narrow, wide):
            lookup(group, bags).backward(grad)
        (rows, states), (exact, exact_states) = (
            read_rows(group, names) for group in (narrow, wide)
        )
        assert 0.3 < float((rows != before).double().mean()) < 1
        least = (exact.to(dtype).double() - exact).abs()
        assert ((rows - exact).abs() <= least + 1e-6 * (1 + exact.abs())).all()
        torch.testing.assert_close(states, exact_states, rtol=1e-5, atol=1e-6)
