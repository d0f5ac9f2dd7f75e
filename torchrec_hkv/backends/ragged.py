"""Lookups whose features differ in their number of bags, made from lookups of equal numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: ``(offsets, batch_size) -> [batch_size, sum of dims]``: a lookup with a fixed set of ids.
UniformLookup = Callable[[Tensor, int], Tensor]


def ragged_lookup(
    lookup: UniformLookup, offsets: Tensor, bags: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Pads every feature with empty bags to the largest number of bags, then drops their outputs.

    The outputs of the empty bags take memory. Only backends without kernels for ragged bags use
    this; ``hkv`` has such kernels.

    Args:
        lookup: a lookup in which all features have the same number of bags.
        offsets: int64 ``[sum of bags + 1]`` into the ids, feature-major.
        bags: number of bags of each feature.
        dims: number of columns of each feature.

    Returns:
        ``[sum of bags * dims]``: one feature after the other, each as ``[bags, dim]``.
    """
    batch_size = max(bags, default=0)
    if all(count == batch_size for count in bags):
        pooled = lookup(offsets, batch_size)
    else:
        # For each padded bag: the first of its offsets. Empty bags begin where the next one does.
        starts, first = [], 0
        for count in bags:
            starts.append(torch.arange(first, first + batch_size).clamp_(max=first + count))
            first += count
        index = torch.cat([*starts, torch.tensor([first])])
        pooled = lookup(offsets[index.to(offsets.device, non_blocking=True)], batch_size)
    parts = pooled.split(list(dims), dim=1)
    return torch.cat([part[:count].reshape(-1) for part, count in zip(parts, bags, strict=True)])
