"""8-bit and 4-bit rows have the bytes of PyTorch's operators, also after the unit has grown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.table_bytes import LEVELS, converted
from torchrec_hkv.serving import row_formats

OPS = torch.ops.torchrec_hkv
FORMATS = pytest.mark.parametrize("row_format", LEVELS)


def rows_of(n: int, dim: int, seed: int, scale: float = 1.0) -> Tensor:
    """Rows of very different ranges, and special values. No row has zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dim, generator=generator)
    rows *= 10.0 ** torch.randint(-9, 3, (n, 1), generator=generator)
    rows += 10.0 ** torch.randint(-9, 2, (n, 1), generator=generator)
    rows[0], rows[1], rows[2], rows[3] = 0.0, -0.0, 0.25, -3e-39
    rows[4, 0] = rows.abs().max()
    rows[5] = rows[4].clone().neg_()
    rows *= scale
    rows[2:][rows[2:] == 0.0] = 0.0
    return rows


@FORMATS
@pytest.mark.parametrize("dim", [1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 128, 200])
@pytest.mark.parametrize("scale", [1e-36, 1.0, 1e33])
def test_bytes(row_format, dim, scale):
    rows = rows_of(500, dim, dim, scale)
    unit = row_formats.unit_for(float(rows.abs().max()))
    got = row_formats.to_bytes(rows, row_format, unit)
    assert torch.equal(got, converted(rows, row_format, unit))
    # A delta may have values up to 32 times as large as the table's largest.
    more = (rows * 31.0).nan_to_num(posinf=3e38, neginf=-3e38)
    got = row_formats.to_bytes(more, row_format, unit)
    assert torch.equal(got, converted(more, row_format, unit))


@FORMATS
def test_negative_zeros(row_format):
    """If a row has zeros of both signs, its minimum is the negative one."""
    rows = torch.zeros(20, 20)
    rows[torch.arange(20), torch.arange(20)] = -0.0
    got = row_formats.to_bytes(rows, row_format)
    assert (got == got[0]).all()
    assert torch.equal(got[:1], converted(torch.full((1, 20), -0.0), row_format, 1.0))


@FORMATS
@pytest.mark.parametrize("dim", [1, 6, 40])
def test_larger_units(row_format, dim):
    """Requantises rows to larger units while they have room."""
    rows = rows_of(400, dim, 3)
    largest = float(rows.abs().max())
    lowered = 0
    for row in rows.split(1):
        data = torch.empty(1, row_formats.row_bytes(row_format, dim), dtype=torch.uint8)
        done = row_formats.quantise_into(row, row_format, largest, data)
        assert done.rows == 1
        for doublings in range(1, min(done.doublings_left, 40) + 1):
            OPS.serving_lower(data, 1)
            unit = row_formats.unit_for(largest * 2**doublings)
            assert torch.equal(data, converted(row, row_format, unit))
            lowered += 1
    assert lowered > 500


@FORMATS
def test_stops(row_format):
    """Stops at the first row that exceeds the unit's limit or is not finite."""
    rows = torch.rand(1000, 5)
    data = torch.empty(1000, row_formats.row_bytes(row_format, 5), dtype=torch.uint8)
    assert row_formats.quantise_into(rows, row_format, 0.7, data).rows == 1000
    rows[700, 3], rows[800, 1] = -5.0, 9.0
    done = row_formats.quantise_into(rows, row_format, 0.7, data)
    assert (done.rows, done.largest) == (700, 5.0)
    assert torch.equal(data[:700], converted(rows[:700], row_format, row_formats.unit_for(0.7)))
    for bad in (torch.inf, -torch.inf, torch.nan):
        rows[700, 3] = bad
        assert row_formats.quantise_into(rows, row_format, 0.7, data).rows == 700
        with pytest.raises(ValueError, match="rows must be finite, but number 700 is not"):
            row_formats.to_bytes(rows, row_format)
    rows = torch.zeros(8, 5)
    rows[6, 2] = 1e-30
    assert row_formats.quantise_into(rows, row_format, 0.0, data[:8]).rows == 6


def test_opcheck():
    rows, data = torch.rand(4, 8), torch.zeros(4, 12, dtype=torch.uint8)
    # It returns numbers that depend on the rows, so it has no fake.
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(OPS.serving_quantize, (rows, 8, 1.0, 1.0, data), test_utils=checks)
    torch.library.opcheck(OPS.serving_lower, (row_formats.to_bytes(rows, "int8"), 1))
    torch.library.opcheck(OPS.serving_gather, (data, torch.tensor([3, 0]), data[:2].clone()))
    torch.library.opcheck(OPS.serving_split, (torch.arange(9), 4))


def test_refused():
    rows, data = torch.zeros(4, 8), torch.zeros(4, 12, dtype=torch.uint8)
    with pytest.raises(TypeError, match="rows must be of dtype Float"):
        OPS.serving_quantize(rows.half(), 8, 1.0, 1.0, data)
    with pytest.raises(ValueError, match="bits is 6, but must be 8 or 4"):
        OPS.serving_quantize(rows, 6, 1.0, 1.0, data)
    with pytest.raises(ValueError, match=r"out must be contiguous and of shape \[4, 8\]"):
        OPS.serving_quantize(rows, 4, 1.0, 1.0, data)
    with pytest.raises(ValueError, match=r"rows must be contiguous and of shape \[n, 1 to 2\^20\]"):
        OPS.serving_quantize(rows.T, 8, 1.0, 1.0, data)
    with pytest.raises(IndexError, match="order has 4, but there are 4 rows"):
        OPS.serving_gather(data, torch.tensor([4]), data[:1])
    with pytest.raises(ValueError, match="parts is 0, but must be from 1"):
        OPS.serving_split(torch.arange(3), 0)
    with pytest.raises(ValueError, match="bytes is -1, but must not be negative"):
        OPS.serving_memory(-1)
