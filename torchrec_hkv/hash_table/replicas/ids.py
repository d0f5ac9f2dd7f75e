"""Which ids replicas must exchange, from the ids that each has touched or lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

#: More ids are sorted: a table of their places has 32 bits for each.
_MOST_HASHED = (1 << 32) - 2


@dataclasses.dataclass(frozen=True)
class MergedIds:
    """Ids of all replicas, int64.

    Attributes:
        touched: distinct ids that are touched in some replica, in the same order in all.
        known: bool, whether some replica that touched or lost them had them at the last sync.
        left: distinct ids that left some replica and are touched in none.
        own: int64, of each id that this replica touched, its place in ``touched``.
    """

    touched: Tensor
    known: Tensor
    left: Tensor
    own: Tensor


def merge_ids(kinds: Sequence[Sequence[Tensor]], own: int) -> MergedIds:
    """Merges the ids of all replicas.

    Args:
        kinds: for each replica distinct ids in three tensors: touched ids that are new to it, other
            touched ids, and ids that left it.
        own: index of this replica.
    """
    parts = [ids for of_replica in kinds for ids in of_replica]
    joined, sizes = torch.cat(parts), [part.numel() for part in parts]
    if joined.device.type == "cpu" and joined.numel() <= _MOST_HASHED:
        # In the order in which they come first. Replicas give their ids in the order of slots, so
        # that tables are read in order.
        return MergedIds(*torch.ops.torchrec_hkv.merge_ids(joined, sizes, own))
    ids, places = _distinct(joined)
    places_of = places.split(sizes)
    known = torch.zeros_like(ids, dtype=torch.bool)
    for kind in (1, 2):
        for places in places_of[kind::3]:
            known.index_fill_(0, places, True)
    mine = torch.cat(places_of[3 * own : 3 * own + 2])
    if not any(sizes[2::3]):
        return MergedIds(ids, known, ids[:0], mine)
    touched = torch.zeros_like(known)
    for kind in (0, 1):
        for places in places_of[kind::3]:
            touched.index_fill_(0, places, True)
    return MergedIds(ids[touched], known[touched], ids[~touched], (touched.cumsum(0) - 1)[mine])


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, ascending, and of each id its place among them."""
    values, order = ids.sort()
    begins = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=begins[1:])
    places = torch.empty_like(order)
    places[order] = begins.cumsum(0) - 1
    return values[begins], places
