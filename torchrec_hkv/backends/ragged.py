"""Lookups whose features differ in their numbers of bags, made of lookups whose features agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: ``(offsets, batch_size) -> [batch_size, sum of dims]``: a lookup of the same ids.
UniformLookup = Callable[[Tensor, int], Tensor]


def ragged_lookup(
    lookup: UniformLookup, offsets: Tensor, bags: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Fills every feature up with empty bags to the number that the longest has, and cuts them off.

    It costs the memory of the empty bags' outputs. For backends without kernels that take ragged
    bags: ``hkv`` has such.

    Args:
        lookup: of bags, of which every feature has the same number.
        offsets: int64 ``[sum of bags + 1]`` into the ids, feature-major.
        bags: number of bags of each feature.
        dims: of each feature.

    Returns:
        ``[sum of bags * dims]``: features one after the other, each as ``[bags, dim]``.
    """
    batch_size = max(bags, default=0)
    if all(count == batch_size for count in bags):
        pooled = lookup(offsets, batch_size)
    else:
        # The bag that each bag of the filled batch begins at; an empty one where the next begins.
        starts, first = [], 0
        for count in bags:
            starts.append(torch.arange(first, first + batch_size).clamp_(max=first + count))
            first += count
        index = torch.cat([*starts, torch.tensor([first])])
        pooled = lookup(offsets[index.to(offsets.device, non_blocking=True)], batch_size)
    parts = pooled.split(list(dims), dim=1)
    return torch.cat([part[:count].reshape(-1) for part, count in zip(parts, bags, strict=True)])
