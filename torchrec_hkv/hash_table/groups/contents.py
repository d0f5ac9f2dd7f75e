"""Whole tables of a group: sizes, growth, and export and load of their contents."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Protocol

from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.table_spec import TableState


class ChangeListener(Protocol):
    """Gets notified of entries that change without a lookup; held by a weak reference."""

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called after the change.

        Args:
            table: index of the table.
            slots: int64, counted from the table's first.
        """


class GroupContents:
    """Operations on whole tables of a group; a base of ``TableGroup``."""

    _group: _C.TableGroup
    _rewrites = 0
    _restores = 0
    _listeners: weakref.WeakSet[ChangeListener] | None = None

    @property
    def rewrites(self) -> int:
        """Number of times that rows may have changed without a lookup, such as by a load."""
        return self._rewrites

    def note_rewrite(self) -> None:
        """Counts a change of rows that are not looked up in the same step. Call it before the
        change."""
        self._rewrites += 1

    @property
    def moves(self) -> tuple[int, int]:
        """A value that changes when entries get slots without a lookup: when a table grows, or
        entries are restored."""
        return self._group.growths, self._restores

    @property
    def removals(self) -> int:
        """Number of calls that have freed slots, other than lookups in tables with
        ``expire_after``."""
        return self._group.removals

    def note_restore(self) -> None:
        """Counts a call that puts entries into slots without a lookup. Call it before that call."""
        self._restores += 1

    def add_listener(self, listener: ChangeListener) -> None:
        """Registers an object that gets notified of entries that change without a lookup, unless
        :meth:`note_rewrite` is called for the whole table."""
        if self._listeners is None:
            self._listeners = weakref.WeakSet()
        self._listeners.add(listener)

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called after entries have changed that were not looked up in the same step.

        Args:
            table: index of the table.
            slots: int64, counted from the table's first.
        """
        for listener in self._listeners or ():
            listener.note_changed(table, slots)

    def ids_and_steps(self, table: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and last steps of slots. Values of free slots are undefined.

        Args:
            table: index of the table.
            slots: int64 ``[n]``, counted from the table's first slot.

        Returns:
            int64 ids ``[n]``, and steps as int32 ``[n]`` with the bits of unsigned numbers.
        """
        return self._group.ids_and_steps(table, slots)

    def present_slots(self, table: int) -> int:
        """Number of slots of a table now; grows up to its capacity."""
        return self._group.present_slots(table)

    def full_slots(self, table: int) -> int:
        """Number of slots of a table at its full capacity."""
        return self._group.full_slots(table)

    def reserve(self, table: int, rows: int) -> None:
        """Grows a table now, so that ``rows`` rows in all fit without further growth.

        Slots found before become invalid, except that pending backwards find theirs again.
        Synchronizes with the device.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity.
            RuntimeError: there is too little memory, or a CUDA graph is being captured; nothing has
                changed.
        """
        self._group.reserve(table, rows)

    def reserve_buckets(self, table: int, num_buckets: int, bucket_slots: int) -> bool:
        """Grows a table to a geometry. Returns False, and changes nothing, if it can't have it."""
        return self._group.reserve_buckets(table, num_buckets, bucket_slots)

    def export_table(self, table: int) -> TableState:
        """A copy of a table's contents."""
        with self.unchanged():
            state = self._group.export_table(table)
        fields = [field.name for field in dataclasses.fields(TableState)]
        return TableState(**{name: getattr(state, name) for name in fields})

    def load_table(self, table: int, state: TableState) -> None:
        """Replaces a table's contents by an exported state of a table of the same capacity.

        The exported table may have grown to another size. This table grows as far; it does not
        shrink.

        Raises:
            ValueError: a tensor has another shape or dtype, or an id is in a slot where the table
                would not find it. Nothing has changed then.
        """
        self.note_rewrite()
        loaded = _C.TableState()
        for field in dataclasses.fields(TableState):
            setattr(loaded, field.name, getattr(state, field.name))
        self._group.load_table(table, loaded)

    def clear_table(self, table: int) -> None:
        """Removes all ids of a table. Counters are not reset."""
        self._group.clear_table(table)

    def read_admission(self, table: int, first: int, n: int) -> Tensor:
        """A copy of ``n`` bytes of a table's admission counters, from byte ``first`` on.

        Returns:
            uint8 ``[n]`` on the table's device, in the layout of ``csrc/hash_table/admission.h``.
        """
        return self._group.read_admission(table, first, n)

    def write_admission(self, table: int, first: int, counts: Tensor) -> None:
        """Overwrites admission counters from byte ``first`` on."""
        self._group.write_admission(table, first, counts)

    def fill_frames(self, table: int) -> None:
        """Brings the rows of the highest scores into HBM, as far as there is room.

        Call it after a table with rows in host memory was filled by something other than lookups.
        Does nothing for other tables.
        """
        self._group.fill_frames(table)
