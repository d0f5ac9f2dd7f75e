"""Ids of any integer type as the int64 that tables take."""

from __future__ import annotations

import torch
from torch import Tensor

#: What ids may be.
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
    """The ids as int64; a uint64 id becomes the int64 of the same bits.

    Args:
        ids: of any shape and any dtype of :data:`ID_DTYPES`.
        what: names them in the sentence that refuses others.

    Returns:
        ``ids`` itself where it is int64.

    Raises:
        TypeError: it is no tensor of integers of 8 to 64 bits.
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
