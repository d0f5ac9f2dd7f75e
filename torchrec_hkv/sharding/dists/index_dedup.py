"""Sending each id of a table once (``use_index_dedup`` of TorchRec's EmbeddingCollection)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def deduplicate(
    features: KeyedJaggedTensor,
    features_per_table: Sequence[int],
    is_unique: Sequence[bool] | None = None,
) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """The distinct ids of each table.

    On a GPU it waits for the device, table by table, as the number of distinct ids is needed.

    Args:
        features: int64 ids, any of them; the features of a table stand together.
        features_per_table: how many features each table has.
        is_unique: for each table, whether its ids are known to be different: they stay as they
            are. None: of none.

    Returns:
        The distinct ids of each table, as one bag of its first feature, each with the last of its
        weights where the ids have weights; and for each id that was given its place among them,
        int64 ``[n]``.
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
