"""What a table of a group holds, as a whole: sizes, growth, and its contents in and out."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Protocol

from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.table_spec import TableState


class ToldOfChanges(Protocol):
    """Is told of entries that change without being looked up; held weakly."""

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called after the change.

        Args:
            table: index of the table.
            slots: int64, counted from the table's first.
        """


class GroupContents:
    """Whole tables of a group. Part of ``TableGroup``, which has the rest."""

    _group: _C.TableGroup
    _rewrites = 0
    _told: weakref.WeakSet[ToldOfChanges] | None = None

    @property
    def rewrites(self) -> int:
        """How often rows may have changed that were not looked up, as when a table is loaded."""
        return self._rewrites

    def note_rewrite(self) -> None:
        """Called before rows change that are not looked up in the same step."""
        self._rewrites += 1

    def tell_changes(self, told: ToldOfChanges) -> None:
        """From now on tells somebody of entries that change without being looked up, where
        :meth:`note_rewrite` is not called for the whole table."""
        if self._told is None:
            self._told = weakref.WeakSet()
        self._told.add(told)

    def note_changed(self, table: int, slots: Tensor) -> None:
        """Called after entries have changed that were not looked up in the same step.

        Args:
            table: index of the table.
            slots: int64, counted from the table's first.
        """
        for told in self._told or ():
            told.note_changed(table, slots)

    def ids_and_steps(self, table: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and last steps of slots; of free slots they mean nothing.

        Args:
            table: index of the table.
            slots: int64 ``[n]``, counted from the table's first slot.

        Returns:
            int64 ``[n]``, and the bits of unsigned steps, int32 ``[n]``.
        """
        return self._group.ids_and_steps(table, slots)

    def present_slots(self, table: int) -> int:
        """Slots that a table has at present; it grows up to its capacity."""
        return self._group.present_slots(table)

    def full_slots(self, table: int) -> int:
        """Slots of a table at its full capacity."""
        return self._group.full_slots(table)

    def reserve(self, table: int, rows: int) -> None:
        """Grows a table now, so that it takes ``rows`` rows in all without growing.

        Slots that were found before are not valid any more, but those of lookups whose backward is
        to come are found again. Waits for the device.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity.
            RuntimeError: there is too little memory, or a CUDA graph is being captured; nothing has
                changed.
        """
        self._group.reserve(table, rows)

    def reserve_buckets(self, table: int, num_buckets: int, bucket_slots: int) -> bool:
        """Grows a table to this geometry; False, and nothing is done, where it can't have it."""
        return self._group.reserve_buckets(table, num_buckets, bucket_slots)

    def export_table(self, table: int) -> TableState:
        """A copy of all that a table holds."""
        state = self._group.export_table(table)
        fields = [field.name for field in dataclasses.fields(TableState)]
        return TableState(**{name: getattr(state, name) for name in fields})

    def load_table(self, table: int, state: TableState) -> None:
        """Replaces all that a table holds by an exported state of a table of the same capacity.

        The state may be of a table that has grown more or less far. This one grows as far; it does
        not shrink.

        Raises:
            ValueError: a tensor has another shape or dtype, or an id stands where the table would
                not find it; nothing has changed then.
        """
        self.note_rewrite()
        loaded = _C.TableState()
        for field in dataclasses.fields(TableState):
            setattr(loaded, field.name, getattr(state, field.name))
        self._group.load_table(table, loaded)

    def clear_table(self, table: int) -> None:
        """Forgets all ids of a table. Counters go on."""
        self._group.clear_table(table)

    def read_admission(self, table: int, first: int, n: int) -> Tensor:
        """A copy of ``n`` bytes of a table's counts of ids that are not admitted, from ``first``.

        Returns:
            uint8 on the table's device; what they are says ``csrc/hash_table/admission.h``.
        """
        return self._group.read_admission(table, first, n)

    def write_admission(self, table: int, first: int, counts: Tensor) -> None:
        """Overwrites such bytes."""
        self._group.write_admission(table, first, counts)

    def fill_frames(self, table: int) -> None:
        """Brings the rows of the highest rank into HBM, as far as there is room.

        For a table with rows in host memory that has just been filled otherwise than by lookups.
        Elsewhere nothing happens.
        """
        self._group.fill_frames(table)
