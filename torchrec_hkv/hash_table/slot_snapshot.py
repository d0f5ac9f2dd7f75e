"""A snapshot of a table's slots, to find out later which of them have changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_hkv.hash_table.groups.table_group import TableGroup

_ops = torch.ops.torchrec_hkv
#: Bytes for each slot of a comparison in which all slots may differ: slots, current and previous
#: ids, and results.
COMPARE_BYTES = 48
#: Slots that a CPU compares at a time, so that their data stays in its caches.
_CPU_SLOTS = 1 << 17
#: Bits of a slot's result of ``slot_changes`` (csrc/hash_table/slot_changes.h).
_IS_THERE, _WAS_THERE, _IS_TOUCHED = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class SnapshotDifference:
    """The differences in a range of slots; tensors are on the table's device.

    Attributes:
        slots: int64, ascending: slots whose entries changed or are new.
        ids: int64, the ids in these slots.
        touched: bool, whether the entry was looked up or changed, and did not just move.
        same_id: bool, whether the slot held the same id before.
        vacated_slots: int64, ascending: slots that held another id before.
        previous_ids: int64, the ids that they held. An id may be in another slot now.
    """

    slots: Tensor
    ids: Tensor
    touched: Tensor
    same_id: Tensor
    vacated_slots: Tensor
    previous_ids: Tensor


class SlotSnapshot:
    """A copy of the id of each slot; it takes 9 bytes of host memory for each slot.

    Slots are counted from the table's first slot.

    Args:
        group: the table's group.
        table: index of the table in the group.
    """

    def __init__(self, group: TableGroup, table: int) -> None:
        self._group, self._table = group, table
        self.ids = torch.empty(0, dtype=torch.int64)
        self.occupied = torch.empty(0, dtype=torch.bool)
        # The group's moves and removals that the snapshot includes.
        self._moves: tuple[int, int] | None = None
        self._removals: int | None = None
        #: Whether lookups free slots, because old entries expire.
        self._expires = group.tables[table].expire_after is not None

    @property
    def entries(self) -> int:
        """Number of entries."""
        return int(self.occupied.count_nonzero())

    def resize(self, *, keep: bool) -> None:
        """Changes the size to the table's current number of slots; added slots count as free."""
        slots = self._group.present_slots(self._table)
        if slots == len(self.ids):
            return
        pin = self._group.device.type == "cuda"  # kernels access it directly
        ids = torch.zeros(slots, dtype=torch.int64, pin_memory=pin)
        occupied = torch.zeros(slots, dtype=torch.bool, pin_memory=pin)
        if keep:
            ids[: len(self.ids)] = self.ids
            occupied[: len(self.ids)] = self.occupied
        self.ids, self.occupied = ids, occupied

    def take(self, batch: int) -> None:
        """Stores the current contents of all slots.

        Args:
            batch: number of slots to read at a time.
        """
        self.resize(keep=False)
        for span in self._ranges(batch, _CPU_SLOTS):
            slots = torch.arange(span.start, span.stop, device=self._group.device)
            was = torch.zeros(len(slots), dtype=torch.bool, device=self._group.device)
            self.ids[span], _ = self._group.ids_and_steps(self._table, slots)
            there, _, _ = self._changes(span.start, was, None, 0, moved=False)
            self.occupied[span] = False
            self.occupied[there.cpu()] = True
        self.acknowledge_moves()

    def acknowledge_moves(self) -> None:
        """Marks all moves and removals of entries so far as included in the snapshot."""
        self._moves, self._removals = self._group.moves, self._group.removals

    def compare(
        self, since: int, batch: int, changed: Tensor | None = None
    ) -> Iterator[SnapshotDifference]:
        """Compares the snapshot with the current contents, and stores these.

        One pass reads last steps, and digests only if slots may have been freed. Ids are compared
        only in slots whose entry was looked up, came or left. They are compared in all slots if
        entries have moved, because a table grew or was restored.

        Args:
            since: entries that were looked up in this step or later count as changed.
            batch: number of slots to compare at a time.
            changed: int64, in host memory: slots of other entries that changed.
        """
        moves, removals = self._group.moves, self._group.removals
        moved, freed = moves != self._moves, self._expires or removals != self._removals
        self.resize(keep=True)
        marked = torch.zeros(0, dtype=torch.bool)
        if changed is not None and changed.numel():
            marked = torch.zeros(len(self.ids), dtype=torch.bool)
            marked[changed] = True
        for span in self._ranges(batch, batch):
            span_marked = marked[span] if len(marked) else None
            found = self._difference(span, since, span_marked, moved, freed)
            if self._group.device.type == "cuda":
                # The GPU writes to the snapshot, and the host may read it after the yield.
                torch.cuda.current_stream(self._group.device).synchronize()
            yield found
        self._moves, self._removals = moves, removals

    def _difference(
        self, span: slice, since: int, marked: Tensor | None, moved: bool, freed: bool
    ) -> SnapshotDifference:
        group, device = self._group, self._group.device
        if device.type == "cpu":
            place = (group.counter_tensor, group.handle, self._table, span.start)
            contents = (self.ids[span], self.occupied[span])
            return SnapshotDifference(
                *_ops.compare_slots(*place, *contents, marked, since, moved, freed)
            )
        was = self.occupied[span].to(device, non_blocking=True)
        if marked is not None:
            marked = marked.to(device)
        slots, bits, ids = self._changes(span.start, was, marked, since, moved)
        is_there, was_there = (bits & _IS_THERE).bool(), (bits & _WAS_THERE).bool()
        before = _ops.exchange_contents(self.ids, self.occupied, slots, ids, is_there)
        touched = (bits & _IS_TOUCHED).bool()
        other = (is_there != was_there) | (ids != before)
        if not moved and not other.any():  # listed entries were looked up
            nothing = slots[:0]
            return SnapshotDifference(slots, ids, touched, touched, nothing, nothing)
        now, vacated = is_there & (touched | other), was_there & other
        return SnapshotDifference(
            slots[now], ids[now], touched[now], ~other[now], slots[vacated], before[vacated]
        )

    def _changes(
        self, first: int, was: Tensor, marked: Tensor | None, since: int, moved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = self._group
        place = (group.counter_tensor, group.handle, self._table, first)
        return _ops.slot_changes(*place, was, marked, since, moved)

    def update(self, slots: Tensor, ids: Tensor | None) -> None:
        """Stores new contents of some slots.

        Args:
            slots: int64 ``[n]``.
            ids: int64 ``[n]``, the ids in these slots; None if the slots are free.
        """
        at = slots.cpu()
        self.occupied[at] = ids is not None
        if ids is not None:
            self.ids[at] = ids.cpu()

    def _ranges(self, batch: int, of_cpu: int) -> Iterator[slice]:
        if self._group.device.type == "cpu":
            batch = min(batch, of_cpu)
        for first in range(0, len(self.ids), batch):
            yield slice(first, min(first + batch, len(self.ids)))
