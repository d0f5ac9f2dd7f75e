"""Lookups of tables with caches of hot rows: cached ids use the cache, others the cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.hot_rows import HotRows

#: ``(ids, offsets, weights) -> [batch_size, sum of dims]``: sums of rows computed from cores.
ColdLookup = Callable[[Tensor, Tensor, Tensor], Tensor]


def lookup_with_hot_rows(
    hot: Mapping[int, HotRows],
    feature_tables: Sequence[int],
    dims: Sequence[int],
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    weights: Tensor | None,
    mean: bool,
    learning_rate: Tensor,
    cold: ColdLookup,
) -> Tensor:
    """Pools the rows of each bag. Cached rows come from the caches, all others from the cores.

    On a GPU it synchronizes with the device, to split the batch. Ids are not checked.

    Args:
        hot: the caches by table index; at least one.
        feature_tables: index of the table of each feature.
        dims: number of columns of each feature.
        ids: int64 ``[n]``, feature-major.
        offsets: int64 ``[features * batch_size + 1]``.
        batch_size: number of bags of each feature.
        weights: float32 ``[n]`` or None.
        mean: whether to divide the sum of a bag by its number of ids.
        learning_rate: float32 ``[]``, for cached rows with an optimizer.
        cold: the lookup of all other ids.

    Returns:
        float32 ``[batch_size, sum of dims]``.
    """
    n = ids.numel()
    if weights is None:
        weights = torch.ones(n, device=ids.device)
    if mean:
        lengths = offsets.diff()
        weights = weights / torch.repeat_interleave(lengths, lengths, output_size=n)
    bounds = _feature_bounds(offsets, batch_size, len(feature_tables))
    places, found = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for feature, table in enumerate(feature_tables):
        if table in hot:
            feature_ids = slice(bounds[feature], bounds[feature + 1])
            places[feature_ids], found[feature_ids] = hot[table].find(ids[feature_ids])
    # The number of cached ids before each offset.
    before = torch.cat([found.new_zeros(1, dtype=torch.int64), found.cumsum(0)])[offsets]
    missing = ~found
    out = cold(ids[missing], offsets - before, weights[missing].contiguous())
    warm_places, warm_weights = places[found], weights[found]
    ends = _feature_bounds(before, batch_size, len(feature_tables))
    warm: list[Tensor] = [out.new_zeros(batch_size, dim) for dim in dims]
    for table, rows in hot.items():
        features = [f for f, feature_ids in enumerate(feature_tables) if feature_ids == table]
        if not features:
            continue
        # Processes all features of a table at once, so that its rows are updated once.
        bags = [before[f * batch_size : (f + 1) * batch_size + 1] for f in features]
        parts = [slice(ends[f], ends[f + 1]) for f in features]
        starts, shift = [], 0
        for bag, part in zip(bags, parts, strict=True):
            starts.append(bag[:-1] - part.start + shift)
            shift += part.stop - part.start
        pooled = rows.lookup(
            torch.cat([warm_places[part] for part in parts]),
            torch.cat([*starts, before.new_tensor([shift])]),
            torch.cat([warm_weights[part] for part in parts]),
            learning_rate,
        )
        by_feature = pooled.view(len(features), batch_size, pooled.shape[1])
        for feature, of_feature in zip(features, by_feature, strict=True):
            warm[feature] = of_feature
    return out + torch.cat(warm, dim=1)


def _feature_bounds(offsets: Tensor, batch_size: int, features: int) -> list[int]:
    """The bounds of each feature's ids. Synchronizes with the device."""
    if batch_size == 0:
        return [0] * (features + 1)
    return offsets[::batch_size].tolist()
