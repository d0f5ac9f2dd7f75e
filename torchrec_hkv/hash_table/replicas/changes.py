"""Finds which ids of a table were touched or left since the last sync of its replicas."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import sums_scores
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.slot_snapshot import COMPARE_BYTES, SlotSnapshot

_ops = torch.ops.torchrec_hkv


@dataclasses.dataclass(frozen=True)
class ChangedIds:
    """Distinct ids, int64 on the table's device.

    Attributes:
        touched: ids that were looked up or restored; new ids come first.
        slots: their slots, int64, counted from the table's first slot.
        num_new: number of touched ids that were not in the table at the last sync.
        removed: ids that were in the table at the last sync and are not in it now.
        old_scores: scores at the last sync of touched ids that are not new; None if the policy does
            not sum scores.
    """

    touched: Tensor
    slots: Tensor
    num_new: int
    removed: Tensor
    old_scores: Tensor | None


class ReplicaChanges:
    """Stores the contents of a table at the last sync, at first its contents at construction.

    It takes 9 bytes of host memory for each slot of the table, 17 under policies that sum scores.

    Args:
        group: the table's group.
        table: index of the table in the group.
        batch_bytes: memory limit of a look in bytes, on the host and on the device each, without
            the ids that changed.
    """

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        self._group, self._table = group, table
        self._batch = max(1, batch_bytes // COMPARE_BYTES)
        self._snapshot = SlotSnapshot(group, table)
        self._scores: Tensor | None = None
        if sums_scores(group.tables[table].eviction):
            self._scores = torch.empty(0, dtype=torch.int64)
        self._lost = torch.empty(0, dtype=torch.int64, device=group.device)
        self._first_open: int | None = None
        self._rewrites = 0
        self._changed: list[Tensor] = []
        group.add_listener(self)
        self.restart()

    def restart(self) -> None:
        """Assumes that all replicas hold what this table holds now."""
        self._snapshot.take(self._batch)
        if self._scores is not None:
            self._scores = torch.zeros(len(self._snapshot.ids), dtype=torch.int64)
            self._read_scores(self._snapshot.occupied.nonzero().flatten())
        self._lost = self._lost[:0]
        self.on_sync()

    def on_sync(self) -> None:
        """Called when the replicas have been synced."""
        self._first_open, self._rewrites = self._group.first_open_step, self._group.rewrites
        self._changed = []
        self._snapshot.acknowledge_moves()

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called by the group: entries changed without being looked up."""
        if table == self._table:
            self._changed.append(slots.cpu())

    def find_changes(self) -> ChangedIds:
        """Finds what changed since the last sync. Call :meth:`on_sync` after the sync; without it,
        the next look finds that everything changed."""
        since = self._first_open if self._rewrites == self._group.rewrites else None
        self._first_open = None
        if since is None:
            return self._all_changed()
        noted = torch.cat(self._changed) if self._changed else None
        differences = list(self._snapshot.compare(since, self._batch, noted))
        ids = _joined([found.ids for found in differences])
        slots = _joined([found.slots for found in differences])
        same_id = _joined([found.same_id for found in differences])
        previous_ids = _joined([*(found.previous_ids for found in differences), self._lost])
        if previous_ids.numel() == 0 and self._scores is None and same_id.all():
            # No entry came or went, so all of these were looked up.
            return ChangedIds(ids, slots, 0, previous_ids, None)
        touched = _joined([found.touched for found in differences])
        in_last_sync, removed, previous_order = same_id, previous_ids, None
        if previous_ids.numel():
            previous_ids, previous_order = previous_ids.sort()
            # The id is in another slot than before, because the table has grown, or because the id
            # had lost its slot.
            moved = ~same_id & torch.isin(ids, previous_ids)
            in_last_sync = same_id | moved
            removed = previous_ids[find_slots(self._group, self._table, previous_ids) < 0].unique()
        # An entry that is new and was not looked up was restored, for example by an import of rows.
        new, old = (~in_last_sync).nonzero().flatten(), (touched & in_last_sync).nonzero().flatten()
        scores = None
        if self._scores is not None:
            self._grow_scores()
            scores = self._scores[slots.cpu()].to(ids.device)
            if previous_order is not None:
                vacated_slots = torch.cat([found.vacated_slots for found in differences])
                lost = torch.zeros(len(self._lost), dtype=torch.int64)
                before = torch.cat([self._scores[vacated_slots.cpu()], lost]).to(ids.device)
                at = torch.searchsorted(previous_ids, ids).clamp_(max=previous_ids.numel() - 1)
                # Entries that moved take their scores along.
                scores = torch.where(moved, before[previous_order][at], scores)
                self._scores[slots.cpu()] = scores.cpu()
            scores = scores[old]
        order = torch.cat([new, old])
        return ChangedIds(ids[order], slots[order], new.numel(), removed, scores)

    def _all_changed(self) -> ChangedIds:
        """All entries as changed; it is not known which ids left."""
        self._snapshot.take(self._batch)
        occupied = self._snapshot.occupied.nonzero().flatten()
        ids = self._snapshot.ids[occupied].to(self._group.device)
        scores = None
        if self._scores is not None:
            self._grow_scores()
            scores = torch.zeros_like(ids)
        return ChangedIds(ids, occupied.to(ids.device), 0, ids[:0], scores)

    # -- what the sync does to the table ----------------------------------------------------------

    def on_write(self, slots: Tensor) -> None:
        """Called after entries have been overwritten by the merged values."""
        self._group.note_changed(self._table, slots)
        self._read_scores(slots)

    def on_erase(self, slots: Tensor) -> None:
        """Called after slots have been freed."""
        self._snapshot.update(slots, None)

    def on_growth(self) -> None:
        """Called after the table may have grown."""
        if len(self._snapshot.ids) == self._group.present_slots(self._table):
            return
        self._snapshot.take(self._batch)
        if self._scores is not None:
            self._grow_scores()
            self._read_scores(self._snapshot.occupied.nonzero().flatten())

    def on_insert(self, ids: Tensor) -> int:
        """Called after ids were inserted and displaced others; returns how many lost their slot."""
        self._lost = self._lost[:0]
        if ids.numel() == 0:
            return 0
        lost = []
        while ids.numel():
            slots = find_slots(self._group, self._table, ids)
            there = slots >= 0
            lost.append(ids[~there])
            ids, at = ids[there], slots[there]
            previous = self._snapshot.ids[at.cpu()].to(ids.device)
            displaced = self._snapshot.occupied[at.cpu()].to(ids.device) & (previous != ids)
            self._snapshot.update(at, ids)
            self._read_scores(at)
            ids = previous[displaced]  # these may be in their other bucket
        # An id that moved to its other bucket was noted in both slots; the first one has another
        # id.
        self._lost = torch.cat(lost).unique()
        return self._lost.numel()

    def _grow_scores(self) -> None:
        missing = len(self._snapshot.ids) - len(self._scores)
        if missing:
            self._scores = torch.cat([self._scores, self._scores.new_zeros(missing)])

    def _read_scores(self, slots: Tensor) -> None:
        if self._scores is None:
            return
        for part in slots.split(self._batch) if slots.numel() else ():
            read = _ops.read_slots(self._group.handle, self._table, part.to(self._group.device))
            self._scores[part.cpu()] = read[3].cpu()


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates parts, without a copy if only one is not empty."""
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(filled or parts[:1])


def find_slots(group: TableGroup, table: int, ids: Tensor) -> Tensor:
    """Slots of ids, int64, counted from the table's first slot; -1 for missing ids.

    Args:
        group: the table's group.
        table: index of a table with a feature.
        ids: int64, on the group's device.
    """
    feature = group.feature_tables.index(table)
    offsets = torch.zeros(group.num_features + 1, dtype=torch.int64, device=group.device)
    offsets[feature + 1 :] = ids.numel()
    slots = group.find(ids, offsets, 1)
    first = sum(group.full_slots(t) for t in range(table))
    return torch.where(slots >= 0, slots - first, slots)
