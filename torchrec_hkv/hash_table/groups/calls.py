"""Operations on ids of a group's tables, all tables in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.entries import Evicted, GroupEvicted
from torchrec_hkv.hash_table.groups.call_arguments import CallArguments
from torchrec_hkv.hash_table.groups.strictness import GroupStrictness
from torchrec_hkv.hash_table.table_spec import TableSpec

_ops = torch.ops.torchrec_hkv


class GroupCalls(GroupStrictness):
    """The operations of HierarchicalKV for the tables of a group; a base of ``TableGroup``.

    :class:`torchrec_hkv.hash_table.HashTable` describes the operations and calls them for one
    table.
    All take ids like :meth:`TableGroup.find`: ``ids``, integers ``[n]`` of 8 to 64 bits,
    feature-major, and ``offsets``, int64 ``[features * batch_size + 1]``, which determine the table
    of each id (None if the group has one feature). To pass ids by table to a group with one feature
    for each table, in order, use ``batch_size`` 1. Equal ids in two tables are two entries. An id
    may occur several times in its table, also in several features.

    Rows are a matrix ``[n, row_width]`` in which row ``i`` belongs to ``ids[i]``. It is as wide as
    the widest table, so that its layout is known on the host. A narrower table uses the first
    columns; the others are ignored as input and zeros as output. A group should therefore have
    tables of similar dims. :meth:`TableGroup.split_rows` and :meth:`TableGroup.join_rows` convert
    between the matrix and one tensor for each feature.

    ``scores`` are int64 ``[n]``, given if a table of the group takes scores. Tables that compute
    their own ignore them.
    """

    tables: tuple[TableSpec, ...]
    device: torch.device
    note_rewrite: Callable[[], None]
    _group: _C.TableGroup
    _arguments: CallArguments

    @property
    def row_width(self) -> int:
        """Number of columns of rows in calls, which is the dim of the widest table."""
        return self._arguments.row_width

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of rows in calls, which is that of the tables, or float32 if theirs differ."""
        return self._arguments.dtype

    # -- lookups ----------------------------------------------------------------------------------

    def find_slots(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> Tensor:
        """Looks up slots, int64 ``[n]``, numbered over all tables of the group; -1 for missing
        ids. Changes nothing."""
        ids = self._arguments.checked_ids(ids)
        return _ops.find(self._group.handle, ids, offsets, batch_size)

    def find_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Looks up rows, the initial row for missing ids, and whether each id was found. Changes
        nothing."""
        with self.reading():
            slots = self.find_slots(ids, offsets, batch_size)
            return self._gather(ids, offsets, batch_size, slots)

    def contains(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> Tensor:
        """Whether ids are in their tables, bool ``[n]``. Changes nothing."""
        return self.find_slots(ids, offsets, batch_size) >= 0

    def find_missing(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Ids that are not in their tables, and their positions. Synchronizes with the device."""
        slots = self.find_slots(ids, offsets, batch_size)
        positions = (slots < 0).nonzero().flatten()
        missing = self._arguments.checked_ids(ids)[positions]
        missing = missing.view(ids.dtype) if ids.dtype == torch.uint64 else missing.to(ids.dtype)
        return missing, positions

    def find_or_insert_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Looks up rows and inserts missing ids with their initial rows; returns rows, and whether
        each id was in its table before.

        Ids that are refused or not admitted get their initial row.
        """
        with self.alone():
            slots, found = self.find_or_insert_slots(ids, offsets, batch_size, scores)
            return self._gather(ids, offsets, batch_size, slots)[0], found

    def find_or_insert_slots(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Like :meth:`find_or_insert_rows`, but returns slots, int64 ``[n]``; -1 for ids without
        one."""
        slots, found, *_ = self._insert(ids, offsets, batch_size, scores, None, initialize=True)
        self.check_strict()
        return slots, found

    # -- insertions -------------------------------------------------------------------------------

    def insert_or_assign(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Sets rows and scores of ids, and inserts missing ids.

        Returns:
            bool ``[n]``: False for ids that were refused or not admitted.
        """
        self._check_rows(ids, rows)
        slots, *_ = self._insert(ids, offsets, batch_size, scores, rows, assign=True)
        self.check_strict()
        return slots >= 0

    def insert_and_evict(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        scores: Tensor | None = None,
        *,
        trim: bool = True,
    ) -> GroupEvicted:
        """Like :meth:`insert_or_assign`, but returns the entries that were evicted, refused or not
        admitted.

        Args:
            ids: see the class.
            offsets: see the class.
            batch_size: see the class.
            rows: see the class.
            scores: see the class.
            trim: see :meth:`HashTable.insert_and_evict`.
        """
        evicted, tables = self._insert_and_evict(ids, offsets, batch_size, rows, scores, trim)
        if len(self.tables) == 1:
            tables = torch.zeros_like(evicted.ids, dtype=torch.int32)
        return GroupEvicted(evicted.ids, evicted.rows, evicted.scores, evicted.count, tables)

    def accum_or_assign(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        accumulate: Tensor,
        scores: Tensor | None = None,
    ) -> None:
        """Adds rows to ids in the tables, and assigns rows to missing ids.

        Args:
            ids: see the class.
            offsets: see the class.
            batch_size: see the class.
            rows: see the class.
            accumulate: bool ``[n]``: True if the caller expects the id in its table, False if it
                expects it to be missing. Ids for which this is wrong are skipped.
            scores: see the class.
        """
        ids = self._arguments.checked_ids(ids)
        self._arguments.check_rows(rows, ids)
        self._arguments.check(accumulate, "accumulate", torch.bool, (ids.numel(),))
        with self.alone():
            slots, *_ = self._insert(
                ids, offsets, batch_size, scores, None, expected_present=accumulate
            )
            nowhere = torch.full_like(slots, -1)
            self._write(torch.where(accumulate, nowhere, slots), rows, add=False)
            self._write(torch.where(accumulate, slots, nowhere), rows, add=True)
        self.check_strict()

    # -- changes of present entries ---------------------------------------------------------------

    def assign(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Sets rows and scores of ids in the tables; returns which were found, bool ``[n]``."""
        self._check_rows(ids, rows)
        with self.alone():
            slots = self._touch(ids, offsets, batch_size, scores)
            self._write(slots, rows, add=False)
        return slots >= 0

    def assign_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, rows: Tensor
    ) -> Tensor:
        """Sets rows, but not scores, of ids in the tables; returns which were found, ``[n]``."""
        self._check_rows(ids, rows)
        with self.alone():
            slots = self.find_slots(ids, offsets, batch_size)
            self.note_rewrite()
            self._write(slots, rows, add=False)
        return slots >= 0

    def assign_scores(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> Tensor:
        """Updates scores, but not rows, of ids in the tables as a hit does; returns which were
        found, bool ``[n]``."""
        return self._touch(ids, offsets, batch_size, scores) >= 0

    def erase(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> None:
        """Removes ids; missing ids are skipped."""
        with self.alone():
            self._erase_slots(self.find_slots(ids, offsets, batch_size))

    # -- inside -----------------------------------------------------------------------------------

    def _check_rows(self, ids: Tensor, rows: Tensor) -> None:
        if isinstance(ids, Tensor):  # anything else is refused by the call itself
            self._arguments.check_rows(rows, ids)

    def _insert_and_evict(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        scores: Tensor | None,
        trim: bool,
    ) -> tuple[Evicted, Tensor]:
        """The evicted entries and their tables; the tables are empty in a group of one table."""
        self._check_rows(ids, rows)
        _, _, out_ids, out_rows, out_scores, number, tables = self._insert(
            ids, offsets, batch_size, scores, rows, assign=True, evicted=True
        )
        self.take_crowded()  # refused ids are returned, so a strict table does not raise
        if trim:
            n = int(number)
            out_ids, out_rows, out_scores = out_ids[:n], out_rows[:n], out_scores[:n]
            tables = tables[:n]
        return Evicted(out_ids, out_rows, out_scores, number), tables

    def _insert(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        scores: Tensor | None,
        rows: Tensor | None,
        *,
        initialize: bool = False,
        assign: bool = False,
        evicted: bool = False,
        expected_present: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        ids = self._arguments.checked_ids(ids)
        self._arguments.check_scores(scores, ids)
        return _ops.insert(
            self._group.counters,
            self._group.handle,
            ids,
            None if scores is None else scores.contiguous(),
            None if rows is None else rows.contiguous(),
            None if expected_present is None else expected_present.contiguous(),
            initialize,
            assign,
            evicted,
            offsets,
            batch_size,
        )

    def _gather(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        ids = self._arguments.checked_ids(ids)
        return _ops.gather_rows(self._group.handle, ids, slots, offsets, batch_size)

    def _write(self, slots: Tensor, rows: Tensor, *, add: bool) -> None:
        group = self._group
        _ops.write_rows(group.counters, group.handle, slots, rows.contiguous(), add)

    def _touch(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None
    ) -> Tensor:
        """Updates scores of ids in the tables; returns slots."""
        group, ids = self._group, self._arguments.checked_ids(ids)
        self._arguments.check_scores(scores, ids)
        if scores is not None:
            scores = scores.contiguous()
        return _ops.touch(group.counters, group.handle, ids, scores, offsets, batch_size)

    def _erase_slots(self, slots: Tensor) -> None:
        _ops.erase_slots(self._group.counters, self._group.handle, slots)
