"""Lookups of tables of which some keep hot rows: those ids come from the cache, others by cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.hot_rows import HotRows

#: ``(ids, offsets, weights) -> [batch_size, sum of dims]``: sums of rows that the cores make.
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
    """Pools the rows of each bag, from the caches where they have them.

    On a GPU it waits for the device, to split the batch. Ids are taken as they are.

    Args:
        hot: the caches, by the index of their table; at least one.
        feature_tables: for each feature the index of its table.
        dims: for each feature its columns.
        ids: int64 ``[n]``, feature-major.
        offsets: int64 ``[features * batch_size + 1]``.
        batch_size: bags a feature.
        weights: float32 ``[n]`` or None.
        mean: divides the sum of a bag by the number of its ids.
        learning_rate: float32 ``[]``, of the cached rows where they have an optimizer.
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
            of = slice(bounds[feature], bounds[feature + 1])
            places[of], found[of] = hot[table].find(ids[of])
    # How many of the ids before each offset are in a cache.
    before = torch.cat([found.new_zeros(1, dtype=torch.int64), found.cumsum(0)])[offsets]
    missing = ~found
    out = cold(ids[missing], offsets - before, weights[missing].contiguous())
    warm_places, warm_weights = places[found], weights[found]
    ends = _feature_bounds(before, batch_size, len(feature_tables))
    warm: list[Tensor] = [out.new_zeros(batch_size, dim) for dim in dims]
    for table, rows in hot.items():
        features = [f for f, of in enumerate(feature_tables) if of == table]
        if not features:
            continue
        # All features of a table at once: its rows are updated once.
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
    """Where each feature's ids begin, and the last end (waits for the device)."""
    if batch_size == 0:
        return [0] * (features + 1)
    return offsets[::batch_size].tolist()
