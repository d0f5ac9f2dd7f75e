"""Entries of a group's tables by what is known of them: selected, forgotten, given back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.entries import Entries, GroupEntries
from torchrec_hkv.hash_table.groups.calls import GroupCalls
from torchrec_hkv.hash_table.spec_checks import check_number

_ops = torch.ops.torchrec_hkv
_UINT64_MAX = (1 << 64) - 1
_INT64_MAX = (1 << 63) - 1
#: Entries that a predicate is shown at a time, where no batch size is given.
_PREDICATE_BATCH = 1 << 20


def _bits(score: int) -> int:
    """The int64 of the same bits as an unsigned score."""
    return score - (1 << 64) if score > _INT64_MAX else score


def _check_bound(what: str, bound: int | None) -> None:
    check_number(what, bound, or_none=True)
    if bound is not None and not 0 <= bound <= _UINT64_MAX:
        raise ValueError(f"{what} is {bound}, but must be from 0 to 2^64 - 1.")


def check_batch_size(batch_size: int) -> None:
    """Raises ValueError for less than one entry a batch."""
    check_number("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be at least 1.")


def chosen_by(where: Callable[..., Tensor], entries: Entries) -> Tensor:
    """What a predicate says of entries.

    Raises:
        TypeError: it is no tensor of bools.
        ValueError: it is not one bool an entry, on the entries' device.
    """
    chosen = where(entries)
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
        kind = chosen.dtype if isinstance(chosen, Tensor) else type(chosen).__name__
        raise TypeError(f"where must give a tensor of dtype torch.bool, but gave {kind}.")
    if chosen.shape != entries.ids.shape or chosen.device != entries.ids.device:
        raise ValueError(
            f"where must give shape {tuple(entries.ids.shape)} on {entries.ids.device}, but gave "
            f"{tuple(chosen.shape)} on {chosen.device}."
        )
    return chosen


class Conditions(TypedDict, total=False):
    """What entries must meet, all that is given of it: keyword arguments, None by default.

    Attributes:
        score_below: unsigned score less than this.
        score_at_least: unsigned score not less than this.
        older_than: last touched more than this many calls ago.
    """

    score_below: int | None
    score_at_least: int | None
    older_than: int | None


class GroupSelection(GroupCalls):
    """Entries of a group by score, age and a predicate. Part of ``TableGroup``.

    One launch looks through all tables that are meant: those of ``tables``, ascending indices, or
    all.
    """

    _group: _C.TableGroup

    def select_slots(self, table: int, **conditions: Unpack[Conditions]) -> Tensor:
        """Slots of the entries of a table that meet every given condition (waits for the device).

        Args:
            table: index of the table.
            conditions: :class:`Conditions`.

        Returns:
            int64, ascending, counted from the table's first slot.

        Raises:
            ValueError: a bound is no unsigned 64-bit number, or an age is negative.
        """
        return self._select_in([table], **conditions)

    def select(
        self, tables: Sequence[int] | None = None, **conditions: Unpack[Conditions]
    ) -> Tensor:
        """The same of several tables, or all: ascending slots, numbered through the tables."""
        indices = list(range(len(self.tables)) if tables is None else tables)
        slots = self._select_in(indices, **conditions)
        # From numbers through what these tables have at present to numbers through the group.
        present = [self._group.present_slots(table) for table in indices]
        ends = list(itertools.accumulate(present))
        shifts = [
            self._first_slots[table] - end + slots_there
            for table, end, slots_there in zip(indices, ends, present, strict=True)
        ]
        if not any(shifts):
            return slots
        which = torch.bucketize(slots, torch.tensor(ends, device=self.device), right=True)
        return slots + torch.tensor(shifts, device=self.device)[which]

    def erase_if(
        self,
        *,
        tables: Sequence[int] | None = None,
        where: Callable[[GroupEntries], Tensor] | None = None,
        **conditions: Unpack[Conditions],
    ) -> int:
        """Forgets all entries that meet every given condition; returns how many.

        Args:
            tables: see the class.
            where: is given entries, and says which are meant: bool ``[n]``.
            conditions: :class:`Conditions`.

        Raises:
            TypeError: ``where`` gives something else.
            ValueError: so, or a condition is impossible.
        """
        chosen = self.select(tables, **conditions)
        if where is not None:
            chosen = self._filter(chosen, where, self.entries_at)
        self._erase_slots(chosen)
        return chosen.numel()

    def export(
        self, batch_size: int = 1 << 20, tables: Sequence[int] | None = None
    ) -> Iterator[GroupEntries]:
        """All entries, table after table, in batches of at most ``batch_size``.

        Which slots hold entries is asked once, before the first batch: entries of batches to come
        must not leave meanwhile. Those that have been given may be erased.
        """
        yield from self.export_if(tables=tables, batch_size=batch_size)

    def export_if(
        self,
        *,
        tables: Sequence[int] | None = None,
        where: Callable[[GroupEntries], Tensor] | None = None,
        batch_size: int = 1 << 20,
        **conditions: Unpack[Conditions],
    ) -> Iterator[GroupEntries]:
        """Entries that meet every given condition; see :meth:`erase_if` and :meth:`export`.

        Raises:
            RuntimeError: a table has grown since the first batch.
        """
        check_batch_size(batch_size)
        growths = self._group.growths
        slots = self.select(tables, **conditions)
        if where is not None:
            slots = self._filter(slots, where, self.entries_at, batch_size)
        for part in slots.split(batch_size) if slots.numel() else ():
            if self._group.growths != growths:  # the slots are of others now, or of none
                raise RuntimeError(
                    "A table has grown during an export, so that its entries are elsewhere: "
                    "insert nothing until all batches are taken, or call reserve() before."
                )
            yield self.entries_at(part)

    def entries_at(self, slots: Tensor) -> GroupEntries:
        """What the tables keep of entries.

        Args:
            slots: int64 ``[n]``, numbered through the tables; each must hold an entry.
        """
        which = torch.bucketize(slots, self._boundaries, right=True, out_int32=True)
        return GroupEntries(*_ops.export_slots(self._group.handle, slots), which)

    # -- inside -----------------------------------------------------------------------------------

    def _number_slots(self) -> None:
        full = [self._group.full_slots(table) for table in range(len(self.tables))]
        self._first_slots = [0, *itertools.accumulate(full)][:-1]
        self._boundaries = torch.tensor(self._first_slots[1:], dtype=torch.int64).to(self.device)

    def _select_in(
        self,
        tables: list[int],
        *,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
    ) -> Tensor:
        """Numbered through the slots that these tables have at present."""
        _check_bound("score_below", score_below)
        _check_bound("score_at_least", score_at_least)
        check_number("older_than", older_than, or_none=True)
        if older_than is not None and older_than < 0:
            raise ValueError(f"older_than is {older_than}, but must not be negative.")
        if score_below == 0:  # no score is
            tables, score_below = [], None
        chosen = _ops.select_slots(
            self._group.counters,
            self._group.handle,
            tables,
            _bits(score_at_least or 0),
            _bits(_UINT64_MAX if score_below is None else score_below - 1),
            _INT64_MAX if older_than is None else max(0, self._group.clock - older_than),
        )
        return chosen.nonzero().flatten()

    @staticmethod
    def _filter(
        slots: Tensor,
        where: Callable[..., Tensor],
        entries_at: Callable[[Tensor], Entries],
        batch_size: int = _PREDICATE_BATCH,
    ) -> Tensor:
        """Those of the slots whose entries a predicate chooses, in bounded memory."""
        parts = slots.split(batch_size) if slots.numel() else ()
        kept = [part[chosen_by(where, entries_at(part))] for part in parts]
        return torch.cat(kept) if kept else slots
