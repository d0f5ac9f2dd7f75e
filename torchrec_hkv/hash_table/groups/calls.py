"""What is done with ids in the tables of a group, all tables in one launch."""

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
    """HierarchicalKV's operations on the tables of a group. Part of ``TableGroup``.

    ``HashTable`` has the same operations for one table, says what they do, and is made of these.
    All of them take ids as :meth:`TableGroup.find` does: ``ids``, integers ``[n]`` of 8 to 64 bits,
    feature-major, and ``offsets``, int64 ``[features * batch_size + 1]`` (None where the group has
    one feature), from which the table of each id follows. A group that has one feature for each
    table, in order, takes ``batch_size`` 1 and offsets by table. The same id in two tables is two
    entries; an id may repeat within its table, also through several features.

    Rows are a matrix ``[n, row_width]``, row ``i`` that of ``ids[i]``: as wide as the widest table
    of the group, so that where a row lies does not depend on what is on the device. A narrower
    table takes the first columns; the others are not read, and are given back as zeros. So a group
    is best made of tables of like dims. :meth:`TableGroup.split_rows` and
    :meth:`TableGroup.join_rows` change between the matrix and a tensor a feature.

    ``scores``, int64 ``[n]``, are given where a table of the group takes scores; tables that make
    their own don't read theirs.
    """

    tables: tuple[TableSpec, ...]
    device: torch.device
    note_rewrite: Callable[[], None]
    _group: _C.TableGroup
    _arguments: CallArguments

    @property
    def row_width(self) -> int:
        """Columns of the rows that calls take and give: the dim of the widest table."""
        return self._arguments.row_width

    @property
    def row_dtype(self) -> torch.dtype:
        """Of the rows that calls take and give: the tables', or float32 where theirs differ."""
        return self._arguments.dtype

    # -- lookups ----------------------------------------------------------------------------------

    def find_slots(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> Tensor:
        """Slots of ids, int64 ``[n]``, numbered through the tables; -1 where an id is not there."""
        ids = self._arguments.checked_ids(ids)
        return _ops.find(self._group.handle, ids, offsets, batch_size)

    def find_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Rows of ids, or initial rows, and whether an id is there; changes nothing."""
        with self.unchanged():
            slots = self.find_slots(ids, offsets, batch_size)
            return self._gather(ids, offsets, batch_size, slots)

    def contains(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> Tensor:
        """Whether ids are in their tables, bool ``[n]``; changes nothing."""
        return self.find_slots(ids, offsets, batch_size) >= 0

    def find_missing(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Ids that are not in their tables, and their positions (waits for the device)."""
        slots = self.find_slots(ids, offsets, batch_size)
        positions = (slots < 0).nonzero().flatten()
        missing = self._arguments.checked_ids(ids)[positions]
        missing = missing.view(ids.dtype) if ids.dtype == torch.uint64 else missing.to(ids.dtype)
        return missing, positions

    def find_or_insert_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows of ids, inserted with their initial rows where they were not there, and which were.

        Of an id that is refused or not admitted it is the initial row.
        """
        with self.alone():
            slots, found = self.find_or_insert_slots(ids, offsets, batch_size, scores)
            return self._gather(ids, offsets, batch_size, slots)[0], found

    def find_or_insert_slots(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same with slots, int64 ``[n]``, instead of rows; -1 for ids without one."""
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
        """Sets rows and scores of ids, inserting those that are not there.

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
        """The same; gives back what the tables threw out, refused or did not admit.

        Args:
            ids: see the class.
            offsets: see the class.
            batch_size: see the class.
            rows: see the class.
            scores: see the class.
            trim: as in :meth:`HashTable.insert_and_evict`.
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
        """Adds rows to ids that are there, assigns them to ids that are not.

        Args:
            ids: see the class.
            offsets: see the class.
            batch_size: see the class.
            rows: see the class.
            accumulate: bool ``[n]``, what the caller believes of each id: True that it is there,
                False that it is not. Where the belief is wrong, nothing is done with the id.
            scores: see the class.
        """
        ids = self._arguments.checked_ids(ids)
        self._arguments.check_rows(rows, ids)
        self._arguments.check(accumulate, "accumulate", torch.bool, (ids.numel(),))
        with self.alone():
            slots, *_ = self._insert(ids, offsets, batch_size, scores, None, believed=accumulate)
            nowhere = torch.full_like(slots, -1)
            self._write(torch.where(accumulate, nowhere, slots), rows, add=False)
            self._write(torch.where(accumulate, slots, nowhere), rows, add=True)
        self.check_strict()

    # -- changes of what is there -----------------------------------------------------------------

    def assign(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        rows: Tensor,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Sets rows and scores of ids that are there; returns which, bool ``[n]``."""
        self._check_rows(ids, rows)
        with self.alone():
            slots = self._touch(ids, offsets, batch_size, scores)
            self._write(slots, rows, add=False)
        return slots >= 0

    def assign_rows(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, rows: Tensor
    ) -> Tensor:
        """Sets rows, not scores, of ids that are there; returns which, bool ``[n]``."""
        self._check_rows(ids, rows)
        with self.alone():
            slots = self.find_slots(ids, offsets, batch_size)
            self.note_rewrite()
            self._write(slots, rows, add=False)
        return slots >= 0

    def assign_scores(
        self, ids: Tensor, offsets: Tensor | None, batch_size: int, scores: Tensor | None = None
    ) -> Tensor:
        """Sets scores, not rows, of ids that are there, as a hit does; returns which."""
        return self._touch(ids, offsets, batch_size, scores) >= 0

    def erase(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> None:
        """Forgets ids; those that are not there are passed over."""
        with self.alone():
            self._erase_slots(self.find_slots(ids, offsets, batch_size))

    # -- inside -----------------------------------------------------------------------------------

    def _check_rows(self, ids: Tensor, rows: Tensor) -> None:
        if isinstance(ids, Tensor):  # what else it is the call itself refuses
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
        """What is given back, and the tables of it; of a group of one table these are empty."""
        self._check_rows(ids, rows)
        _, _, out_ids, out_rows, out_scores, number, tables = self._insert(
            ids, offsets, batch_size, scores, rows, assign=True, evicted=True
        )
        self.take_crowded()  # they are given back, so that a strict table need not raise
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
        believed: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        ids = self._arguments.checked_ids(ids)
        self._arguments.check_scores(scores, ids)
        return _ops.insert(
            self._group.counters,
            self._group.handle,
            ids,
            None if scores is None else scores.contiguous(),
            None if rows is None else rows.contiguous(),
            None if believed is None else believed.contiguous(),
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
        """A call that touches what is there; returns slots."""
        group, ids = self._group, self._arguments.checked_ids(ids)
        self._arguments.check_scores(scores, ids)
        if scores is not None:
            scores = scores.contiguous()
        return _ops.touch(group.counters, group.handle, ids, scores, offsets, batch_size)

    def _erase_slots(self, slots: Tensor) -> None:
        _ops.erase_slots(self._group.counters, self._group.handle, slots)
