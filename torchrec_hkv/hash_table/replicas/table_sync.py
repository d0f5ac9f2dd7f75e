"""The sync of one table."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.files.state_columns import OWN_STEPS, StateColumns
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.replicas.changes import ChangedIds, ReplicaChanges, find_slots
from torchrec_hkv.hash_table.replicas.ids import MergedIds
from torchrec_hkv.hash_table.replicas.merging import ScoreMerge

_ops = torch.ops.torchrec_hkv
#: Memory limit that a FileTarget needs; it does not affect batches that are already in memory.
_TARGET_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Synced:
    """The result of a sync on a rank.

    Attributes:
        touched: number of ids that a replica had touched; each column shard counts.
        erased: number of ids that were removed here because they had left another replica.
        lost: number of ids that found no slot here, or lost their slot to another id.
        sent_bytes: bytes that this rank sent. A ring all-reduce of n bytes counts as
            ``2 n (replicas - 1) / replicas``.
    """

    touched: int = 0
    erased: int = 0
    lost: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Synced) -> Synced:
        return Synced(
            self.touched + other.touched,
            self.erased + other.erased,
            self.lost + other.lost,
            self.sent_bytes + other.sent_bytes,
        )


class TableSync:
    """One sync of one table: merges ids part by part, then inserts the ids of other replicas.

    Args:
        group: the table's group.
        table: index of the table in the group.
        changes: the table's contents at the last sync.
        replicas: number of replicas.
        states: whether optimizer states are merged.
        changed_ids: what changed in this replica.
        merged_ids: the ids of all replicas.
    """

    def __init__(
        self,
        group: TableGroup,
        table: int,
        changes: ReplicaChanges,
        replicas: int,
        states: bool,
        changed_ids: ChangedIds,
        merged_ids: MergedIds,
    ) -> None:
        self.group, self.table, self.changes = group, table, changes
        self.replicas, self.ids, self.states = replicas, merged_ids.ids, states
        self.spec = group.tables[table]
        dim, self.dtype, width, self.scored, _, _ = _C.table_layout(group.handle, table)
        self.width = width if states else 0
        parts = StateColumns.of_layout(group.state_layout)
        # The optimizer's own count of a row's updates comes last (csrc/common/optimizers.h).
        has_own_step = states and group.state_layout >= OWN_STEPS
        used = parts.of_columns * dim + parts.of_rows
        self.row_step_column = dim + used - 1 if has_own_step else None
        self.merge = ScoreMerge(self.spec)
        #: Number of sums and of maxima of an id.
        self.columns = dim + self.width + 2
        self.maxima = 1 + self.scored + (self.row_step_column is not None)
        #: Number of float32 values of a record (csrc/hash_table/slot_values.h), and of int64 values
        #: besides: the score to maximize, and the score to sum.
        self.record_columns = self.columns
        self.numbers = int(self.scored) + self.merge.adds
        self.row_bytes = 4 * self.columns + 8 * (1 + 2 * self.scored) + 8
        self.in_last_sync, self.is_touched, self.is_new = (
            merged_ids.in_last_sync,
            merged_ids.touched,
            merged_ids.is_new,
        )
        self.slots, self.has_all_ids = merged_ids.slots, not merged_ids.missing.numel()
        self.no_scores = merged_ids.ids[:0]
        self._missing: list[dict[str, Tensor]] = []
        self._erased = self._erase(merged_ids.removed)
        self.before: Tensor | None = None
        if changed_ids.old_scores is not None:
            self.before = torch.zeros_like(self.ids)
            self.before[merged_ids.touched_positions[changed_ids.num_new :]] = (
                changed_ids.old_scores
            )

    def _erase(self, removed: Tensor) -> int:
        """Erases ids that left another replica; returns how many were in this replica."""
        if removed.numel() == 0:
            return 0
        group, table = self.group, self.table
        slots = find_slots(group, table, removed)
        slots = slots[slots >= 0]
        first = sum(group.full_slots(t) for t in range(table))
        _ops.erase_slots(group.counter_tensor, group.handle, slots + first)
        self.changes.on_erase(slots)
        return slots.numel()

    def keep_missing(self, entries: dict[str, Tensor]) -> None:
        """Keeps entries that are not in this replica; :meth:`finish` inserts them."""
        self._missing.append(entries)

    def finish(self) -> Synced:
        """Ends the sync after all parts are merged and written."""
        here = self.slots if self.has_all_ids else self.slots[self.slots >= 0]
        if here.numel():
            self.changes.on_write(here)
        return Synced(self.ids.numel(), self._erased, self._insert())

    def _insert(self) -> int:
        """Inserts entries of other replicas; returns how many ids have no slot afterwards.

        It runs last, so that an id has been read before it is displaced.
        """
        ids = [batch["ids"] for batch in self._missing]
        number = sum(part.numel() for part in ids)
        if number:
            group, table = self.group, self.table
            target = FileTarget(group, table, _TARGET_BYTES)
            group.reserve(table, min(group.sizes()[table] + number, target.capacity))
            self.changes.on_growth()
            target = FileTarget(group, table, _TARGET_BYTES)
            for batch in self._missing:
                if batch["ids"].numel():
                    target.restore(batch, exact=False)
        return self.changes.on_insert(torch.cat(ids) if ids else self.ids[:0])
