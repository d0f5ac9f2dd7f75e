"""Batches with a separate batch size for each feature (TorchRec's variable batch per feature)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def rank_major(
    flat: torch.Tensor, strides: Sequence[Sequence[int]], dims: Sequence[int]
) -> torch.Tensor:
    """Reorders pooled features to the order in which TorchRec sends them.

    Args:
        flat: ``[sum of bags * dims]``, one feature after the other, each with the bags of all
            ranks.
        strides: for each feature, its number of bags from each rank.
        dims: number of columns of each feature.

    Returns:
        The same values, rank by rank, and feature by feature for each rank.
    """
    num_ranks = len(strides[0]) if strides else 0
    if num_ranks <= 1 or len(strides) == 1:
        return flat
    sizes = [count * dim for counts, dim in zip(strides, dims, strict=True) for count in counts]
    parts = flat.split(sizes)
    return torch.cat([part for rank in range(num_ranks) for part in parts[rank::num_ranks]])


def merged_groups(
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    num_features: Sequence[int],
) -> torch.Tensor:
    """Merges the outputs of groups of features, in the order in which TorchRec sends them.

    Args:
        outputs: for each group flat values, rank by rank, and feature by feature for each rank.
        sizes: for each group, the number of values of each rank and feature, in this order.
        num_features: number of features of each group.

    Returns:
        The values rank by rank, for each rank group by group, and for each group feature by
        feature.
    """
    parts = [output.split(list(size)) for output, size in zip(outputs, sizes, strict=True)]
    num_ranks = max(
        (len(group) // count for group, count in zip(parts, num_features, strict=True)), default=0
    )
    return torch.cat(
        [
            part
            for rank in range(num_ranks)
            for group, count in zip(parts, num_features, strict=True)
            for part in group[rank * count : (rank + 1) * count]
        ]
    )


def padded_lengths(
    lengths: torch.Tensor, strides: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads every feature with empty bags to the largest batch size.

    Args:
        lengths: ``[sum of strides]``, feature-major.
        strides: number of bags of each feature.

    Returns:
        Lengths ``[features * longest]``, and the positions of the given lengths in them.
    """
    longest = max(strides, default=0)
    places = torch.tensor(
        list(
            itertools.chain.from_iterable(
                range(feature * longest, feature * longest + count)
                for feature, count in enumerate(strides)
            )
        ),
        dtype=torch.int64,
        device=lengths.device,
    )
    padded = lengths.new_zeros(len(strides) * longest)
    return padded.index_copy(0, places, lengths), places
