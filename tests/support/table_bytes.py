"""Computes the bytes of a read-only table with PyTorch's operators, from all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.table_file import place_layer

LEVELS = {"int8": 255, "int4": 15}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MAX = torch.finfo(torch.float16).max


def converted(rows: Tensor, row_format: str, unit: float) -> Tensor:
    """Returns the expected result of ``row_formats.to_bytes``."""
    if row_format in DTYPES:
        data = rows.to(DTYPES[row_format]).contiguous().view(torch.uint8)
    else:
        data = torch.cat(_quantised(rows, row_format, unit), dim=1)
    size = row_formats.row_bytes(row_format, rows.shape[1])
    return functional.pad(data, (0, size - data.shape[1])).contiguous()


def _quantised(rows: Tensor, row_format: str, unit: float) -> tuple[Tensor, Tensor]:
    levels = LEVELS[row_format]
    units = rows / unit
    low, high = units.aminmax(dim=1, keepdim=True)
    offset = low.half().clamp(-_MAX, _MAX)
    ideal_step = (high - offset.float()) / levels
    scale = ideal_step.half()
    next_up = (scale.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(scale.float() < ideal_step, next_up, scale)
    step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    codes = ((units - offset.float()) / step).round().clamp(0, levels).to(torch.uint8)
    if row_format == "int4":
        codes = functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.cat([scale, offset], dim=1).view(torch.uint8), codes


def table_bytes(ids: Tensor, rows: Tensor, row_format: str) -> bytes:
    """Returns the file of a table whose builder has memory for all entries."""
    index, order = place_layer(ids, None)
    unit = row_formats.unit_for(float(rows.abs().max()) if rows.numel() else 0.0)
    data = converted(rows, row_format, unit)[order]
    head = index.numpy().tobytes()
    return head + bytes(-len(head) % 4096) + data.numpy().tobytes()
