"""Updates of 16-bit and int8 rows equal float32 updates of the same rows and states, rounded."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from tests.support.optimizer_cases import OPTIMIZERS
from tests.support.pairwise import pairwise
from tests.support.row_training import exact_gradients, make_group, read_rows

STEPS = 10
DTYPES = [torch.float16, torch.bfloat16, torch.int8]


def assert_nearest(rows, before, exact, dtype):
    """16-bit rows round to the nearest value."""
    minimum = (exact.to(dtype).double() - exact).abs()
    assert ((rows - exact).abs() <= minimum + 1e-6 * (1 + exact.abs())).all()


def assert_within_a_unit(rows, before, exact, dtype):
    """int8 rows round to a neighbouring code, up as often as down."""
    unit = exact.abs().amax(1, keepdim=True) / 127
    assert ((rows - exact).abs() <= 1.001 * unit).all()
    units = ((rows - exact) / unit.clamp(min=1e-20))[(rows != before).any(1)]
    assert float(units.abs().mean()) > 0.05
    assert float(units.mean()) == pytest.approx(0, abs=5 / units.numel() ** 0.5)


@pytest.mark.parametrize(
    ("case", "dtype", "dim"),
    [
        pytest.param(*values, marks=pytest.mark.slow if values[1] != torch.int8 else ())
        for values in pairwise(OPTIMIZERS, DTYPES, [7, 8, 64, 260])
    ],
)
def test_rounded_rows(device_type, case, dtype, dim):
    names = random_ids(200).unique()
    narrow, wide = (
        make_group(OPTIMIZERS[case], dim, device_type, 2000, rows)
        for rows in (dtype, torch.float32)
    )
    everyone = Bags(names, torch.arange(len(names) + 1), len(names)).to(device_type)
    assert_rounded = assert_within_a_unit if dtype == torch.int8 else assert_nearest
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
        assert_rounded(rows, before, exact, dtype)
        torch.testing.assert_close(states, exact_states, rtol=1e-5, atol=1e-6)
