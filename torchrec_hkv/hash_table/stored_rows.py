"""Converts rows between the form in which tables store them and numbers.

Rows of floats are stored unchanged. An int8 row is stored as bytes: its float32 scale, an int8 for
each column, and zeros up to a multiple of four bytes. A column's value is the scale times its int8.
The scale is the row's largest magnitude over 127 (``csrc/common/int8_rows.h``).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCALE_BYTES = 4
_MIN = 2.0**-100  # a row with only smaller values is stored as zeros
_MAX = 2.0**127  # larger values are stored as this


def stored_row_bytes(dim: int, element_bytes: int) -> int:
    """Bytes of a stored row.

    Args:
        dim: number of columns.
        element_bytes: bytes of a column's value; 1 for int8.
    """
    return _SCALE_BYTES + (dim + 3) // 4 * 4 if element_bytes == 1 else dim * element_bytes


def stored_width(dim: int, dtype: torch.dtype) -> int:
    """Number of elements of a stored row of this dtype."""
    return stored_row_bytes(dim, dtype.itemsize) // dtype.itemsize


def number_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of rows as calls take and return them: that of the table, or float32 for int8."""
    return torch.float32 if dtype == torch.int8 else dtype


def int8_parts(stored: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The int8 ``[n, dim]`` and the scales, float32 ``[n]``, of stored rows of 8 bits."""
    scales = stored[:, :_SCALE_BYTES].contiguous().view(torch.float32).flatten()
    return stored[:, _SCALE_BYTES : _SCALE_BYTES + dim].contiguous(), scales


def join_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Stored rows of 8 bits from the results of :func:`int8_parts`."""
    n, dim = codes.shape
    stored = torch.zeros(n, stored_width(dim, torch.int8), dtype=torch.int8, device=codes.device)
    stored[:, :_SCALE_BYTES] = scales.float().contiguous().view(torch.int8).view(n, _SCALE_BYTES)
    stored[:, _SCALE_BYTES : _SCALE_BYTES + dim] = codes
    return stored


def numbers_of(stored: Tensor, dim: int) -> Tensor:
    """Stored rows as numbers ``[n, dim]``; rows of floats unchanged."""
    if stored.dtype != torch.int8:
        return stored
    codes, scales = int8_parts(stored, dim)
    return codes.float().mul_(scales[:, None])


def stored_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``[n, dim]`` as a table of this dtype stores them, rounded to the nearest."""
    if dtype != torch.int8:
        return rows.to(dtype)
    rows = rows.float()
    largest = rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))
    is_number, is_zero = largest.isfinite(), largest < _MIN
    largest = largest.clamp(max=_MAX)
    # torch divides tensors as int8_scale does, but may multiply by a number's reciprocal.
    maximum = torch.full_like(largest, 127)
    scales = torch.where(is_number, torch.where(is_zero, 0.0, largest / maximum), torch.nan)
    inverse = torch.where(is_number & ~is_zero, maximum / largest, 0.0)
    codes = (rows * inverse[:, None]).nan_to_num_().clamp_(-127, 127).round_()
    return join_int8(torch.where(is_number[:, None], codes, 0).to(torch.int8), scales)


def stored_with_scales(rows: Tensor, scales: Tensor) -> Tensor:
    """Stored rows of 8 bits, exactly, from numbers ``[n, dim]`` and scales, float32 ``[n]``."""
    divisors = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
    codes = torch.where(scales.isfinite()[:, None], rows / divisors[:, None], 0)
    return join_int8(codes.round().clamp(-127, 127).to(torch.int8), scales)
