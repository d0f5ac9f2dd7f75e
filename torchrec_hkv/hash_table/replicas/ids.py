"""Merges the ids that replicas have touched or lost, and finds them in this replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.replicas.changes import ChangedIds, find_slots

_ops = torch.ops.torchrec_hkv
#: Up to this number of ids are hashed, with a 32-bit index for each; more ids are sorted.
_MAX_HASHED = (1 << 32) - 2


@dataclasses.dataclass(frozen=True)
class MergedIds:
    """Ids of all replicas, on the table's device.

    Attributes:
        ids: int64 ``[n]``, distinct ids that a replica touched, in the same order in all replicas.
        in_last_sync: bool ``[n]``, whether a replica that touched or lost the id had it at the last
            sync.
        touched: bool ``[n]``, whether this replica touched the id.
        is_new: bool ``[n]``, whether this replica touched the id and it was new here.
        slots: int64 ``[n]``, the slot of the id in this replica, counted from the table's first
            slot; -1 if the id is not here.
        removed: int64, distinct ids that left a replica and that no replica touched.
        touched_positions: int64, the index in ``ids`` of each id that this replica touched.
        missing: int64, the indices in ``ids`` of ids that are not in this replica.
    """

    ids: Tensor
    in_last_sync: Tensor
    touched: Tensor
    is_new: Tensor
    slots: Tensor
    removed: Tensor
    touched_positions: Tensor
    missing: Tensor


def merge_ids(
    group: TableGroup,
    table: int,
    changes: ChangedIds,
    replicas: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
    replica: int,
) -> MergedIds:
    """Merges the ids of all replicas, and finds them in this replica.

    Args:
        group: the table's group.
        table: index of the table in the group.
        changes: what changed in this replica.
        replicas: the ids of each replica: touched ids that are new to it, other touched ids, and
            ids that left it. Each occurs once.
        sizes: for each replica, the number of ids of these three kinds.
        replica: index of this replica.
    """
    if group.device.type == "cpu" and sum(map(len, replicas)) <= _MAX_HASHED:
        # Ids stay in the order in which they first occur. Replicas give them in the order of slots,
        # so the table is read in order.
        flat = [n for of_replica in sizes for n in of_replica]
        return MergedIds(
            *_ops.merge_ids(group.handle, table, list(replicas), flat, replica, changes.slots)
        )
    ids, in_last_sync, removed, places = _merge(
        [
            of_replica.split(list(split_sizes))
            for of_replica, split_sizes in zip(replicas, sizes, strict=True)
        ],
        replica,
    )
    is_new, touched = torch.zeros((2, len(ids)), dtype=torch.bool, device=ids.device)
    touched.index_fill_(0, places, True)
    is_new.index_fill_(0, places[: changes.num_new], True)
    slots = torch.full_like(ids, -1)
    slots.index_copy_(0, places, changes.slots)
    others = (~touched).nonzero().flatten()
    slots.index_copy_(0, others, find_slots(group, table, ids.index_select(0, others)))
    absent = (slots < 0).nonzero().flatten()
    return MergedIds(ids, in_last_sync, touched, is_new, slots, removed, places, absent)


def _merge(
    ids_by_replica: Sequence[Sequence[Tensor]], replica: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The attributes ``ids``, ``in_last_sync``, ``removed`` and ``touched_positions`` of
    :class:`MergedIds`."""
    parts = [ids for of_replica in ids_by_replica for ids in of_replica]
    joined, sizes = torch.cat(parts), [part.numel() for part in parts]
    ids, places = _distinct(joined)
    places_of = places.split(sizes)
    in_last_sync = torch.zeros_like(ids, dtype=torch.bool)
    for kind in (1, 2):
        for places in places_of[kind::3]:
            in_last_sync.index_fill_(0, places, True)
    replica_positions = torch.cat(places_of[3 * replica : 3 * replica + 2])
    if not any(sizes[2::3]):
        return ids, in_last_sync, ids[:0], replica_positions
    touched = torch.zeros_like(in_last_sync)
    for kind in (0, 1):
        for places in places_of[kind::3]:
            touched.index_fill_(0, places, True)
    return (
        ids[touched],
        in_last_sync[touched],
        ids[~touched],
        (touched.cumsum(0) - 1)[replica_positions],
    )


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids, ascending, and the index of each id among them."""
    values, order = ids.sort()
    begins = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=begins[1:])
    places = torch.empty_like(order)
    places[order] = begins.cumsum(0) - 1
    return values[begins], places
