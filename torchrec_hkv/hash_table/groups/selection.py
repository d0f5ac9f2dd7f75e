"""Selection of entries by score, age and predicates, to erase or to export them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.entries import Entries, GroupEntries
from torchrec_hkv.hash_table.groups.calls import GroupCalls
from torchrec_hkv.hash_table.spec_checks import check_int64, check_number

_ops = torch.ops.torchrec_hkv
_UINT64_MAX = (1 << 64) - 1
_INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)
#: Number of entries that a predicate gets at a time if no batch size is given.
_PREDICATE_BATCH = 1 << 20


def _bits(key: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return key - (1 << 64) if key > _INT64_MAX else key


def _range(customized: bool) -> tuple[int, int]:
    """The lowest and the highest score of tables."""
    return (_INT64_MIN, _INT64_MAX) if customized else (0, _UINT64_MAX)


def _check_bound(what: str, bound: int | None, kinds: Collection[bool]) -> None:
    check_number(what, bound, or_none=True)
    low = min((_range(customized)[0] for customized in kinds), default=_INT64_MIN)
    high = max((_range(customized)[1] for customized in kinds), default=_UINT64_MAX)
    if bound is not None and not low <= bound <= high:
        first = "0" if low == 0 else "-2^63"
        last = "2^63" if high == _INT64_MAX else "2^64"
        raise ValueError(f"{what} is {bound}, but must be from {first} to {last} - 1.")


def check_batch_size(batch_size: int) -> None:
    """Checks that ``batch_size`` is an integer of at least 1.

    Raises:
        ValueError: ``batch_size`` is not.
    """
    check_int64("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be at least 1.")


def chosen_by(where: Callable[..., Tensor], entries: Entries) -> Tensor:
    """The result of a predicate for entries.

    Raises:
        TypeError: the result is not a bool tensor.
        ValueError: the result does not have one value for each entry, or is on another device.
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
    """Conditions that entries must meet, as keyword arguments; None for no condition.

    Attributes:
        score_below: the score is less than this.
        score_at_least: the score is at least this.
        older_than: the entry was last touched more than this many calls ago.
    """

    score_below: int | None
    score_at_least: int | None
    older_than: int | None


def check_some_condition(
    clear: str, where: Callable[..., Tensor] | None, conditions: Conditions
) -> None:
    """Checks that there is a condition, since erasing without one would remove everything.

    Args:
        clear: the call that removes everything, for the message.
        where: a predicate, or None.
        conditions: all other conditions.

    Raises:
        ValueError: there is no condition.
    """
    if where is None and all(bound is None for bound in conditions.values()):
        raise ValueError(
            "erase_if was given no condition and would erase every entry: give score_below, "
            f"score_at_least, older_than or where, or call {clear} to erase all."
        )


class GroupSelection(GroupCalls):
    """Selection of entries by score, age and a predicate; a base of ``TableGroup``.

    One launch scans all tables given as ``tables`` (ascending indices), or all tables of the group.
    """

    _group: _C.TableGroup
    clock: int

    def select_slots(self, table: int, **conditions: Unpack[Conditions]) -> Tensor:
        """Slots of a table's entries that meet all conditions. Synchronizes with the device.

        Args:
            table: index of the table.
            conditions: :class:`Conditions`.

        Returns:
            int64, ascending, counted from the table's first slot.

        Raises:
            ValueError: a bound is not a score of the policy, or an age is negative.
        """
        return self._select_in([table], **conditions)

    def select(
        self, tables: Sequence[int] | None = None, **conditions: Unpack[Conditions]
    ) -> Tensor:
        """Slots of entries of several tables, or of all, that meet all conditions: ascending,
        numbered over all tables of the group."""
        indices = list(range(len(self.tables)) if tables is None else tables)
        with self.unchanged():
            slots = self._select_in(indices, **conditions)
            present = [self._group.present_slots(table) for table in indices]
        # Convert numbers over the current slots of these tables to numbers over the full group.
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
        """Removes all entries that meet all given conditions; returns how many.

        Args:
            tables: see the class.
            where: a predicate, called with batches of entries; returns which match, bool ``[n]``.
            conditions: :class:`Conditions`.

        Raises:
            TypeError: ``where`` returns something else than a bool tensor.
            ValueError: ``where`` returns another shape, a condition is invalid, or none is given;
                :meth:`clear_table` removes all entries.
        """
        check_some_condition("clear_table()", where, conditions)
        with self.alone():
            chosen = self.select(tables, **conditions)
            if where is not None:
                chosen = self._filter(chosen, where, self.entries_at)
            self._erase_slots(chosen)
        return chosen.numel()

    def export(
        self, batch_size: int = 1 << 20, tables: Sequence[int] | None = None
    ) -> Iterator[GroupEntries]:
        """Yields all entries, table after table, in batches of at most ``batch_size``.

        The ids are those at the time of the first batch; row and score of an entry are those at the
        time of its batch. Entries that have been yielded may be erased. Within :meth:`unchanged`
        all batches are consistent.

        Raises:
            RuntimeError: an entry left the table or moved before it was yielded.
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
        """Yields entries that meet all conditions; see :meth:`erase_if` and :meth:`export`.

        Raises:
            RuntimeError: an entry left the table or moved before it was yielded.
        """
        check_batch_size(batch_size)
        with self.unchanged():
            growths = self._group.growths
            slots = self.select(tables, **conditions)
            if where is not None:
                slots = self._filter(slots, where, self.entries_at, batch_size)
            if slots.numel() == 0:
                return
            parts = slots.split(batch_size)
            ids = [self.ids_at(part) for part in parts[1:]]
            entries = self.entries_at(parts[0])
        yield entries
        del entries
        for part, its_ids in zip(parts[1:], ids, strict=True):
            with self.unchanged():
                self._check_still_there(part, its_ids, growths)
                entries = self.entries_at(part)
            yield entries
            del entries

    def entries_at(self, slots: Tensor) -> GroupEntries:
        """Entries of occupied slots.

        Args:
            slots: int64 ``[n]``, numbered over all tables of the group.
        """
        which = torch.bucketize(slots, self._boundaries, right=True, out_int32=True)
        return GroupEntries(*_ops.export_slots(self._group.handle, slots), which)

    def ids_at(self, slots: Tensor) -> Tensor:
        """Ids of slots that are numbered over all tables of the group, int64 ``[n]`` on the CPU."""
        parts = slots.split(_PREDICATE_BATCH)
        return torch.cat([self._group.entries_at(part)[0].cpu() for part in parts])

    # -- inside -----------------------------------------------------------------------------------

    def _check_still_there(self, slots: Tensor, ids: Tensor, growths: int) -> None:
        """Raises unless the ids are still in these slots."""
        if self._group.growths != growths:
            raise RuntimeError(
                "A table has grown during an export, which moved its entries: insert nothing until "
                "all batches are taken, or call reserve() before."
            )
        now, there = self._group.entries_at(slots)
        missing = slots.numel() - int(((now.cpu() == ids) & there.cpu()).sum())
        if missing:
            raise RuntimeError(
                f"{missing} entries left the table during an export before they were returned: "
                "insert and erase nothing until all batches are taken, or export in unchanged()."
            )

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
        """Slots of the entries that meet all conditions, numbered over the current slots of these
        tables."""
        if sorted({*tables} & {*range(len(self.tables))}) != tables:
            raise ValueError(
                f"tables must be ascending numbers from 0 to {len(self.tables) - 1}, but are "
                f"{tables}."
            )
        kinds = [self.tables[table].eviction == "customized" for table in tables]
        of_group = {spec.eviction == "customized" for spec in self.tables}
        _check_bound("score_below", score_below, of_group)
        _check_bound("score_at_least", score_at_least, of_group)
        check_number("older_than", older_than, or_none=True)
        if older_than is not None and older_than < 0:
            raise ValueError(f"older_than is {older_than}, but must not be negative.")
        touched_before = _INT64_MAX if older_than is None else max(0, self.clock - older_than)
        chosen = []
        # One launch for consecutive tables whose scores have the same range.
        for customized, run in itertools.groupby(
            zip(tables, kinds, strict=True), key=lambda its: its[1]
        ):
            low, high = _range(customized)
            at_least = low if score_at_least is None else max(low, score_at_least)
            at_most = high if score_below is None else min(high, score_below - 1)
            none = at_least > at_most
            chosen.append(
                _ops.select_slots(
                    self._group.counters,
                    self._group.handle,
                    [table for table, _ in run],
                    _bits(0 if none else at_least - low),
                    _bits(0 if none else at_most - low),
                    0 if none else touched_before,  # no entry was touched before call 0
                )
            )
        if not chosen:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat(chosen).nonzero().flatten()

    @staticmethod
    def _filter(
        slots: Tensor,
        where: Callable[..., Tensor],
        entries_at: Callable[[Tensor], Entries],
        batch_size: int = _PREDICATE_BATCH,
    ) -> Tensor:
        """The slots whose entries match a predicate, in bounded memory."""
        parts = slots.split(batch_size) if slots.numel() else ()
        selected = [part[chosen_by(where, entries_at(part))] for part in parts]
        return torch.cat(selected) if selected else slots
