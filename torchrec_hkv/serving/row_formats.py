"""Row formats of read-only tables: conversion to bytes and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrec_hkv.serving import ops  # noqa: F401  registers the ops

_ops = torch.ops.torchrec_hkv

#: Formats of rows. Quantised formats have codes of 8 or 4 bits, with one scale and one offset for
#: each row.
RowFormat = Literal["fp32", "fp16", "bf16", "int8", "int4"]
#: In the order of ``RowFormat`` in ``csrc/serving/table.h``.
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Largest code of quantised formats.
LEVELS = {"int8": 255, "int4": 15}
_BITS = {"int8": 8, "int4": 4}
_HEADER_BYTES = 4
_HALF_MAX = torch.finfo(torch.float16).max
# Offsets are at most this many units.
_MAX_UNITS = 2.0**10
#: Number of doublings of the unit that stands for no limit, for rows without values.
MAX_DOUBLINGS = 1 << 30


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


def max_for(unit: float) -> float:
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
    rows = rows.contiguous()
    data = torch.empty(
        rows.shape[0], row_bytes(row_format, rows.shape[1]), dtype=torch.uint8, device=rows.device
    )
    if row_format in _DTYPES:
        convert_into(rows, row_format, data)
        return data
    bits = _BITS[row_format]
    done, _, _ = _ops.serving_quantize(rows.float(), bits, unit, math.inf, data)
    if done < rows.shape[0]:
        raise ValueError(f"rows must be finite, but number {done} is not.")
    return data


def convert_into(rows: Tensor, row_format: RowFormat, data: Tensor) -> None:
    """Like :func:`to_bytes` for formats that are not quantised, into contiguous memory."""
    dtype, dim = _DTYPES[row_format], rows.shape[1]
    columns = data.view(dtype)
    columns[:, :dim] = rows
    columns[:, dim:] = 0


@dataclasses.dataclass(frozen=True)
class Quantised:
    """The result of :func:`quantise_into`.

    Attributes:
        rows: number of rows before the first row that needs a larger unit or is not finite.
        largest: largest absolute value of that row.
        doublings_left: number of times that the unit of the rows before it can be doubled while
            ``serving_lower`` can still convert them.
    """

    rows: int
    largest: float
    doublings_left: int


def quantise_into(rows: Tensor, row_format: RowFormat, largest: float, data: Tensor) -> Quantised:
    """Like :func:`to_bytes` for quantised formats, but writes to memory and uses the unit for the
    largest value so far.

    Args:
        rows: float32 ``[n, dim]``, contiguous.
        row_format: format of the result.
        largest: largest known absolute value of these rows and of earlier ones.
        data: uint8 ``[n, row_bytes]``, contiguous.
    """
    unit = unit_for(largest)
    limit = _MAX_UNITS * unit if largest > 0.0 else 0.0
    return Quantised(*_ops.serving_quantize(rows, _BITS[row_format], unit, limit, data))


def largest_of(rows: Tensor) -> float:
    """Largest absolute value of rows; not finite if a value is not finite."""
    low, high = rows.aminmax()
    return float(torch.maximum(-low, high))


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
