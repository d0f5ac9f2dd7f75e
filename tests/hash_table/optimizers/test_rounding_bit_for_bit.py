"""Stochastic rounding of 16-bit rows equals a model in exact fractions, for all kinds of values."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.support.batches import random_ids
from tests.support.int8_rows import draws
from tests.support.narrow_rows import narrow_group, train_rows
from tests.support.row_training import read_rows
from torchrec_hkv.hash_table import SGD, Constant, table_seed

INF, NAN = float("inf"), float("nan")
#: Bits of the fraction, the smallest normal exponent, and what is infinite after rounding.
FORMATS = {torch.float16: (10, -14, 2**16), torch.bfloat16: (7, -126, 2**128)}
ODD_VALUES = {
    torch.float16: (65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 2.0**-14, 2.0**-14 - 2.0**-38),
    torch.bfloat16: (3.4e38, -3.3895e38, 2.0**-126, 1e-39, 2.0**-133, 3 * 2.0**-149),
}
ODD_ANYWHERE = (0.0, INF, -INF, NAN, 2.0**-149, 2.0**-24, 2.0**-25, -(2.0**-56), 3e38, -1.0, 1.5)


def _rounded(value: float, draw: int, dtype: torch.dtype) -> float:
    if value != value:
        return value
    bits, minimum, infinite = FORMATS[dtype]
    if abs(value) >= infinite:
        return math.copysign(INF, value)
    size = Fraction(abs(value))
    exponent = max(minimum, math.frexp(value)[1] - 1)
    unit = Fraction(2) ** (exponent - bits)
    if dtype == torch.bfloat16:
        up = Fraction(draw, 2**16)
    else:
        up = Fraction(draw % 2**13, 2**13)
        if size < Fraction(2) ** minimum:
            size = Fraction(round(size * 2**37), 2**37)  # ties to even
    result = (size / unit + up) // 1 * unit
    result = INF if result >= infinite else float(result)
    return -result if value < 0 else result


def _values(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of values that have neither subnormal nor infinite neighbours, and rows of all kinds."""
    signs = torch.randint(0, 2, (rows, dim)) * 2.0 - 1
    usual = signs * torch.exp2(torch.rand(rows, dim) * 28 - 13)
    any_size = signs * torch.exp2(torch.rand(rows, dim, dtype=torch.double) * 276 - 149).float()
    small = signs * torch.exp2(-14 - torch.rand(rows, dim) * 45)
    nans = torch.tensor([0x7FFFFFFF, 0x7F80FFFF, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    odd = torch.cat([torch.tensor([*ODD_ANYWHERE, *ODD_VALUES[dtype]]), nans])
    odd = odd[torch.randint(len(odd), (rows, dim))] * signs
    few_odd = torch.where(torch.rand(rows, dim) < 0.05, odd, usual)
    kinds = torch.stack([usual, any_size, small, odd, few_odd])
    return kinds[torch.arange(rows) % len(kinds), torch.arange(rows)]


def _check(device: str, dtype: torch.dtype, ids: Tensor, values: Tensor, column_offset: int):
    dim = values.shape[1]
    optimizer = SGD(stochastic_rounding=True, rounding_seed=3)
    group = narrow_group(
        dtype, device, optimizer, dim, 2 * len(ids), Constant(0.0), column_offset=column_offset
    )
    train_rows(group, ids, -values)
    expected = torch.empty(len(ids), dim, dtype=torch.double)
    for row, id_ in enumerate(ids.tolist()):
        its = draws(table_seed(0, "t"), id_, 1, column_offset + dim, 3)[column_offset:].tolist()
        # Negative zeros are added to zeros.
        of_row = (values[row] + 0.0).double().tolist()
        of_row = [_rounded(value, draw, dtype) for value, draw in zip(of_row, its, strict=True)]
        expected[row] = torch.tensor(of_row, dtype=torch.double)
    rows = read_rows(group, ids)[0]
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows.signbit()[~rows.isnan()], expected.signbit()[~rows.isnan()])


@pytest.mark.parametrize("column_offset", [0, 1, 2, 3, 4, 30])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 8, 12, 16, 20, 33, 64])
@pytest.mark.parametrize("dtype", FORMATS)
def test_bit_for_bit(device_type, dtype, dim, column_offset):
    ids = random_ids(40).unique()
    _check(device_type, dtype, ids, _values(len(ids), dim, dtype), column_offset)


def test_values_that_seldom_round_up(device_type):
    """Some two hundred of these do, to the least float16."""
    ids = random_ids(400).unique()
    values = torch.exp2(-30 - 5 * torch.rand(len(ids), 64))
    _check(device_type, torch.float16, ids, values, 0)
