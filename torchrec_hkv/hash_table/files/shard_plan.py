"""Assigns the entries of a save to shards."""

from __future__ import annotations

import bisect

from torch import Tensor


def plan_shards(counts: Tensor, maximum: int) -> list[tuple[int, int, int]]:
    """Cuts the owner buckets into ranges of at most ``maximum`` entries.

    Args:
        counts: number of entries of each owner bucket.
        maximum: maximal number of entries in a shard.

    Returns:
        ``(begin, end, entries)`` of each shard, ascending and disjoint. A bucket with more entries
        is a range by itself, cut into several shards.
    """
    ends = counts.cumsum(0).tolist()  # entries up to the end of each bucket
    plan = []
    begin, before = 0, 0
    while before < ends[-1]:
        end = max(begin + 1, bisect.bisect_right(ends, before + maximum))
        entries = ends[end - 1] - before
        plan += [
            (begin, end, min(maximum, entries - first)) for first in range(0, entries, maximum)
        ]
        begin, before = end, ends[end - 1]
    return plan
