"""Deduplication of ids before they are sent (``use_index_dedup`` of EmbeddingCollection)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def deduplicate(
    features: KeyedJaggedTensor,
    features_per_table: Sequence[int],
    is_unique: Sequence[bool] | None = None,
) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Finds the unique ids of each table.

    On a GPU it synchronizes once for each table, because the number of unique ids is needed.

    Args:
        features: any int64 ids; the features of a table are adjacent.
        features_per_table: number of features of each table.
        is_unique: for each table, whether its ids are known to be unique and are not deduplicated.
            None: False for all tables.

    Returns:
        The unique ids of each table, as one bag of its first feature, with the last weight of each
        id if ids have weights; and the position of each input id among them, int64 ``[n]``.
    """
    batch_size = features.stride()
    lengths = features.lengths().new_zeros(len(features.keys()) * batch_size)
    counts = features.length_per_key()
    values: list[torch.Tensor] = []
    weights, lasts = features.weights_or_none(), []
    places: list[torch.Tensor] = []
    feature = begin = found = 0
    is_unique = [False] * len(features_per_table) if is_unique is None else is_unique
    for num_features, unique in zip(features_per_table, is_unique, strict=True):
        end = begin + sum(counts[feature : feature + num_features])
        distinct = features.values()[begin:end]
        if unique:
            inverse = torch.arange(end - begin, device=distinct.device)
        else:
            distinct, inverse = torch.unique(distinct, return_inverse=True)
        if distinct.numel() > 0:
            lengths[feature * batch_size] = distinct.numel()
        if weights is not None:
            last = inverse.new_zeros(distinct.numel())
            positions = torch.arange(begin, end, device=inverse.device)
            lasts.append(weights[last.scatter_reduce_(0, inverse, positions, "amax")])
        values.append(distinct)
        places.append(inverse + found)
        feature, begin, found = feature + num_features, end, found + distinct.numel()
    empty = features.values()[:0]
    reduced = KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([*values, empty]),
        weights=None if weights is None else torch.cat([*lasts, weights[:0]]),
        lengths=lengths,
        stride=batch_size,
    )
    return reduced, torch.cat([*places, empty])
