"""Every optimizer makes of int8 rows what it makes of the same rows of float32, to one unit."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from tests.support.optimizer_cases import OPTIMIZERS
from tests.support.row_training import exact_gradients, make_group, read_rows


@pytest.mark.parametrize("dim", [7, 64, 260])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_within_a_unit(device_type, case, dim):
    names = random_ids(200).unique()
    narrow, wide = (
        make_group(OPTIMIZERS[case], dim, device_type, 2000, rows)
        for rows in (torch.int8, torch.float32)
    )
    everyone = Bags(names, torch.arange(len(names) + 1), len(names)).to(device_type)
    for _ in range(10):
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
        unit = exact.abs().amax(1, keepdim=True) / 127
        assert ((rows - exact).abs() <= 1.001 * unit).all()
        # Up as often as down.
        units = ((rows - exact) / unit.clamp(min=1e-20))[(rows != before).any(1)]
        assert float(units.abs().mean()) > 0.05
        assert float(units.mean()) == pytest.approx(0, abs=5 / units.numel() ** 0.5)
        torch.testing.assert_close(states, exact_states, rtol=1e-5, atol=1e-6)
