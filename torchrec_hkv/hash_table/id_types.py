"""Conversion of ids of any integer dtype to int64."""

from __future__ import annotations

import torch
from torch import Tensor

#: Allowed dtypes of ids.
ID_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def int64_ids(ids: Tensor, what: str = "ids") -> Tensor:
    """Converts ids to int64; a uint64 id becomes the int64 with the same bits.

    Args:
        ids: ids of any shape, with a dtype of :data:`ID_DTYPES`.
        what: name of the argument in the error message.

    Returns:
        ``ids`` itself if it is int64.

    Raises:
        TypeError: ``ids`` is not a tensor of integers of 8 to 64 bits.
    """
    if isinstance(ids, Tensor):
        if ids.dtype == torch.int64:
            return ids
        if ids.dtype == torch.uint64:
            return ids.view(torch.int64)
        if ids.dtype in ID_DTYPES:
            return ids.to(torch.int64)
    kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
    raise TypeError(f"{what} must be a tensor of integers of 8 to 64 bits, but is {kind}.")
