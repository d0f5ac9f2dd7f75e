"""A separate implementation of the sums of gradients of the backward on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 64


def sums_in_pieces(ids: Tensor, terms: Tensor, number: int) -> Tensor:
    """Sums the terms of each id in the order of the batch, ``[number, dim]``.

    Terms are summed in single precision in pieces of 64, of which the first may be shorter, and the
    pieces in double precision.

    Args:
        ids: int64 ``[n]``, from 0 to ``number - 1``.
        terms: float32 ``[n, dim]``.
        number: number of distinct ids.
    """
    by_id = ids.sort(stable=True).indices
    counts = ids.bincount(minlength=number)
    left = torch.empty_like(ids)  # number of later positions with the same id
    left[by_id] = counts.cumsum(0).repeat_interleave(counts) - 1 - torch.arange(len(ids))
    piece = left // PIECE
    pieces = int(piece.max()) + 1
    assert pieces > 3
    sums = torch.zeros(pieces * number, terms.shape[1])
    sums.index_add_(0, piece * number + ids, terms)
    total = torch.zeros(number, terms.shape[1], dtype=torch.double)
    for part in reversed(sums.split(number)):
        total += part
    return total.float()
