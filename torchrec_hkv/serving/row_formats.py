"""Row formats of read-only tables: conversion to bytes and back."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

#: Bits of a code in quantised formats, which have one scale and one offset a row.
RowFormat = Literal["fp32", "fp16", "bf16", "int8", "int4"]
#: In the order of ``RowFormat`` in ``csrc/serving/table.h``.
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LEVELS = {"int8": 255, "int4": 15}
_HEADER_BYTES = 4
_HALF_MAX = torch.finfo(torch.float16).max


def check_row_format(value: object, name: str = "rows") -> RowFormat:
    """A row format.

    Raises:
        ValueError: ``value`` is not a row format.
    """
    if value not in ROW_FORMATS:
        allowed = ", ".join(map(repr, ROW_FORMATS))
        raise ValueError(f"{name} is {value!r}, but must be one of {allowed}.")
    return value


def row_bytes(row_format: RowFormat, dim: int) -> int:
    """Bytes of a row. Quantised rows take their codes and 4 bytes, rounded up to a multiple of
    4."""
    match row_format:
        case "fp32":
            size = 4 * dim
        case "int8":
            size = _HEADER_BYTES + dim
        case "int4":
            size = _HEADER_BYTES + (dim + 1) // 2
        case _:
            size = 2 * dim
    return -(-size // 4) * 4


def unit_for(largest: float) -> float:
    """The unit of scales and offsets of a table's quantised rows.

    Args:
        largest: largest absolute value in the table.

    Returns:
        A power of two, so large that no offset exceeds 2^10 units. This is far below the largest
        float16, so that rows may grow by a factor of 32 while small scales keep their precision.
    """
    if largest == 0.0:
        return 1.0
    return 2.0 ** max(-126, min(127, math.ceil(math.log2(largest)) - 10))


def most_for(unit: float) -> float:
    """Largest absolute value of quantised rows with this unit."""
    return unit * _HALF_MAX


def to_bytes(rows: Tensor, row_format: RowFormat, unit: float = 1.0) -> Tensor:
    """Converts rows to the bytes of a table.

    Args:
        rows: finite floats ``[n, dim]`` in host memory.
        row_format: format of the result.
        unit: unit of quantised rows, from :func:`unit_for`. Ignored for other formats.

    Returns:
        uint8 ``[n, row_bytes]``.
    """
    size = row_bytes(row_format, rows.shape[1])
    if row_format in _DTYPES:
        data = rows.to(_DTYPES[row_format]).contiguous().view(torch.uint8)
    else:
        data = torch.cat(_quantised(rows.float(), row_format, unit), dim=1)
    if data.shape[1] < size:
        data = functional.pad(data, (0, size - data.shape[1]))
    return data.contiguous()


def _quantised(rows: Tensor, row_format: RowFormat, unit: float) -> tuple[Tensor, Tensor]:
    levels = _LEVELS[row_format]
    units = rows / unit
    low, high = units.aminmax(dim=1, keepdim=True)
    offset = low.half().clamp(-_HALF_MAX, _HALF_MAX)
    # A scale that is rounded down can't represent the row's largest value.
    wanted = (high - offset.float()) / levels
    scale = wanted.half()
    scale = torch.where(scale.float() < wanted, _next_up(scale), scale)
    step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = units.sub_(offset.float()).div_(step).round_().clamp_(0, levels).to(torch.uint8)
    if row_format == "int4":
        codes = functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.cat([scale, offset], dim=1).view(torch.uint8), codes


def _next_up(values: Tensor) -> Tensor:
    """Rounds non-negative values up to float16."""
    return (values.view(torch.int16) + 1).view(torch.float16)


def from_bytes(data: Tensor, row_format: RowFormat, dim: int, unit: float = 1.0) -> Tensor:
    """Converts the bytes of a table to rows: the inverse of :func:`to_bytes`.

    Args:
        data: uint8 ``[n, row_bytes]``.
        row_format: format of the rows.
        dim: columns of a row.
        unit: the unit given to :func:`to_bytes`.

    Returns:
        float32 ``[n, dim]``.
    """
    if row_format in _DTYPES:
        dtype = _DTYPES[row_format]
        return data[:, : dim * dtype.itemsize].contiguous().view(dtype).float()
    scale, offset = unit * data[:, :_HEADER_BYTES].contiguous().view(torch.float16).float().T
    codes = data[:, _HEADER_BYTES:]
    if row_format == "int4":
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    return offset[:, None] + scale[:, None] * codes[:, :dim].float()
