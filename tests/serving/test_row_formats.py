"""8-bit and 4-bit rows differ from the original rows by a bounded error."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.serving import row_formats

LEVELS = {"int8": 255, "int4": 15}


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 300.0, 1e30])
@pytest.mark.parametrize("dim", [1, 7, 64, 129])
@pytest.mark.parametrize("row_format", LEVELS)
def test_error_is_half_a_step(row_format, dim, scale):
    rows = scale * torch.randn(200, dim, generator=torch.Generator().manual_seed(dim))
    unit = row_formats.unit_for(float(rows.abs().max()))
    stored = row_formats.to_bytes(rows, row_format, unit)
    assert stored.shape == (200, row_formats.row_bytes(row_format, dim))
    got = row_formats.from_bytes(stored, row_format, dim, unit)
    low, high = rows.aminmax(dim=1, keepdim=True)
    # Half a step, and the rounding error of the offset; both are float16.
    allowed = (high - low) / LEVELS[row_format] * 0.505 + low.abs() * 2**-10 + scale * 1e-6
    assert bool(((got - rows).abs() <= allowed).all())


@pytest.mark.parametrize("row_format", LEVELS)
def test_equal_columns(row_format):
    rows = torch.tensor([[0.25] * 6, [0.0] * 6, [-3.0] * 6])
    unit = row_formats.unit_for(3.0)
    stored = row_formats.to_bytes(rows, row_format, unit)
    assert torch.equal(row_formats.from_bytes(stored, row_format, 6, unit), rows)


def test_bytes():
    """With 128 columns: at most .28 of float32, including the index."""
    assert row_formats.row_bytes("int8", 128) + 10 <= 0.28 * 4 * 128
    assert row_formats.row_bytes("int4", 128) == 68
    assert row_formats.row_bytes("fp16", 3) == 8


def test_no_format():
    with pytest.raises(ValueError, match="rows is 'fp8', but must be one of 'fp32', "):
        row_formats.check_row_format("fp8")
