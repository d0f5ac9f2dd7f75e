"""Parts of tables in a sync: packs, exchanges, merges and writes their entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.hash_table.initial_rows import initial_rows
from torchrec_hkv.hash_table.replicas.merging import merged_values
from torchrec_hkv.hash_table.replicas.table_sync import TableSync
from torchrec_hkv.hash_table.replicas.wire import Wire
from torchrec_hkv.hash_table.stored_rows import numbers_of, stored_as

_ops = torch.ops.torchrec_hkv
_STEP_BITS = 0xFFFFFFFF


class SyncPart:
    """A range of the ids of a table in a sync.

    Args:
        table_sync: the table's sync.
        own: the range in ``table_sync.ids``.
    """

    def __init__(self, table_sync: TableSync, slot_range: slice) -> None:
        self.table_sync, self._slot_range = table_sync, slot_range
        self.n = slot_range.stop - slot_range.start

    @property
    def _slots(self) -> Tensor:
        return self.table_sync.slots[self._slot_range]

    @property
    def words(self) -> int:
        """Number of int64 values of its records and scores in a message."""
        return (self.n * self.table_sync.record_columns + 1) // 2 + self.n * self.table_sync.numbers

    def _numbers(self, message: Tensor, begin: int) -> Sequence[Tensor]:
        """Views of the scores in a message; none for tables without scores.

        The first view has the numbers that are maximized. Under policies that sum scores, a second
        view has the numbers that are summed.
        """
        table_sync = self.table_sync
        if not table_sync.numbers:
            return ()
        end = begin + self.words
        return (
            message[end - self.n * table_sync.numbers : end]
            .view(table_sync.numbers, self.n)
            .unbind()
        )

    def pack(self, message: Tensor, begin: int) -> None:
        """Writes this replica's entries to a message for the other of two replicas.

        Args:
            message: int64; gets the records, then the numbers.
            begin: offset of the part in the message.
        """
        table_sync, slot_range = self.table_sync, self._slot_range
        at = (slot_range.start, slot_range.stop, message, begin)
        scores = _ops.pack_records(
            table_sync.group.handle,
            table_sync.table,
            table_sync.slots,
            table_sync.is_new,
            *at,
            table_sync.states,
        )
        if table_sync.numbers:
            self._score(scores, self._slots >= 0, *self._numbers(message, begin))

    def merge(self, message: Tensor, received: Tensor, begin: int) -> None:
        """Merges two messages, writes the ids that are in this replica and keeps the others.

        Args:
            message: this replica's message; overwritten.
            received: the other replica's message.
            begin: offset of the part in both messages.
        """
        table_sync, slot_range = self.table_sync, self._slot_range
        numbers = self._numbers(message, begin)
        scores = table_sync.no_scores
        if numbers:
            highest, *added = numbers
            their_highest, *their_added = self._numbers(received, begin)
            torch.maximum(highest, their_highest, out=highest)
            sums = [
                slot_range.add_(other) for slot_range, other in zip(added, their_added, strict=True)
            ]
            scores = table_sync.merge.merged(highest, *(sums or [None]))
        _ops.merge_records(
            table_sync.group.counter_tensor,
            table_sync.group.handle,
            table_sync.table,
            table_sync.slots,
            table_sync.ids,
            table_sync.in_last_sync,
            slot_range.start,
            slot_range.stop,
            message,
            received,
            begin,
            scores,
            table_sync.states,
            -1 if table_sync.row_step_column is None else table_sync.row_step_column,
        )
        if not table_sync.has_all_ids:
            records = message[begin:].view(torch.float32)[: self.n * table_sync.record_columns]
            self._keep_missing(records.view(self.n, -1), scores)

    def _keep_missing(self, records: Tensor, scores: Tensor) -> None:
        """Keeps merged records of ids that are not in this replica, to insert them later."""
        table_sync = self.table_sync
        absent = (self._slots < 0).nonzero().flatten()
        if absent.numel() == 0:
            return
        missing, dim = records[absent], table_sync.spec.dim
        entries = {
            "ids": table_sync.ids[self._slot_range][absent],
            "rows": stored_as(missing[:, :dim], table_sync.dtype).contiguous(),
            "last_steps": missing[:, -2].contiguous().view(torch.int32),
        }
        if table_sync.states:
            entries["states"] = missing[:, dim:-2].contiguous()
        if table_sync.scored:
            entries["scores"] = scores[absent]
        table_sync.keep_missing(entries)

    def _score(
        self, scores: Tensor, there: Tensor, highest: Tensor, added: Tensor | None = None
    ) -> None:
        """Writes the numbers that are maximized to ``highest``, and summed to ``added``."""
        table_sync = self.table_sync
        touched = table_sync.is_touched[self._slot_range]
        before = (
            torch.zeros_like(scores)
            if table_sync.before is None
            else table_sync.before[self._slot_range]
        )
        of_policy = table_sync.merge.highest_of(scores, before, touched)
        highest[:] = torch.where(there, of_policy, table_sync.merge.lowest(self.n, there.device))
        if added is not None:
            added[:] = torch.where(there, table_sync.merge.added(scores, before, touched), 0)

    def fill(self, sums: Tensor, maxima: Tensor, added: Tensor | None) -> None:
        """Writes this replica's entries, to be summed and maximized over replicas.

        Args:
            sums: float32 ``[n, columns]``.
            maxima: int64 ``[maxima, n]``.
            added: int64 ``[n]``; None if the policy does not sum scores.
        """
        table_sync, there = self.table_sync, self._slots >= 0
        last_steps, scores = self._read(sums)
        sums[:, -2] = there
        sums[:, -1] = there & ~table_sync.is_new[self._slot_range]
        maxima[0] = last_steps
        maxima[0] &= _STEP_BITS
        if table_sync.row_step_column is not None:
            maxima[-1] = sums[:, table_sync.row_step_column]
        if table_sync.scored:
            self._score(scores, there, maxima[1], added)

    def _read(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last steps and scores; writes rows and states to ``sums``. Ids that are not in
        this replica get zeros."""
        table_sync = self.table_sync
        if table_sync.dtype == torch.float32:
            place = (table_sync.group.handle, table_sync.table)
            return _ops.read_values(*place, self._slots, sums, table_sync.states)
        there = (self._slots >= 0).nonzero().flatten()
        _, rows, last_steps, scores, states = _ops.read_slots(
            table_sync.group.handle, table_sync.table, self._slots[there]
        )
        sums.zero_()
        dim = table_sync.spec.dim
        sums[there, :dim] = numbers_of(rows, dim).to(torch.float32)
        if table_sync.states:
            sums[there, dim:-2] = states
        steps_of_all = last_steps.new_zeros(self.n)
        steps_of_all[there] = last_steps
        scores_of_all = scores.new_zeros(self.n if table_sync.scored else 0)
        if table_sync.scored:
            scores_of_all[there] = scores
        return steps_of_all, scores_of_all

    def write(self, sums: Tensor, maxima: Tensor, added: Tensor | None) -> None:
        """Merges, writes the ids that are in this replica and keeps the others.

        Args:
            sums: see :meth:`fill`, over all replicas; overwritten, like the other arguments.
            maxima: see :meth:`fill`.
            added: see :meth:`fill`.
        """
        table_sync, spec = self.table_sync, self.table_sync.spec
        ids = table_sync.ids[self._slot_range]

        def initial(places: Tensor) -> Tensor:
            return initial_rows(
                ids[places],
                spec.dim,
                table=spec.name,
                seed=spec.seed,
                initializer=spec.initializer,
                column_offset=spec.column_offset,
            )

        values = merged_values(
            sums, table_sync.replicas, table_sync.in_last_sync[self._slot_range], initial
        )
        if table_sync.row_step_column is not None:
            values[:, table_sync.row_step_column] = maxima[-1]
        last_steps = maxima[0].to(torch.int32)
        scores = table_sync.merge.merged(maxima[1], added) if table_sync.scored else ids[:0]
        if table_sync.dtype == torch.float32:
            place = (table_sync.group.counter_tensor, table_sync.group.handle, table_sync.table)
            _ops.write_values(
                *place, self._slots, ids, values, last_steps, scores, table_sync.states
            )
        entries = {
            "ids": ids,
            "rows": stored_as(values[:, : spec.dim], table_sync.dtype),
            "last_steps": last_steps,
        }
        if table_sync.states:
            entries["states"] = values[:, spec.dim :]
        if table_sync.scored:
            entries["scores"] = scores
        if table_sync.dtype != torch.float32:
            there = (self._slots >= 0).nonzero().flatten()
            self._overwrite({name: tensor[there] for name, tensor in entries.items()}, there)
        if table_sync.has_all_ids:
            return
        absent = (self._slots < 0).nonzero().flatten()
        table_sync.keep_missing({name: tensor[absent] for name, tensor in entries.items()})

    def _overwrite(self, entries: dict[str, Tensor], there: Tensor) -> None:
        """Overwrites the entries that are in this replica; for rows of any dtype."""
        table_sync, slots = self.table_sync, self._slots[there]
        group, table = table_sync.group, table_sync.table
        states = (
            entries["states"]
            if table_sync.states
            else _ops.read_slots(group.handle, table, slots)[4]
        )
        _ops.overwrite_slots(
            group.counter_tensor,
            group.handle,
            table,
            slots,
            entries["ids"],
            entries["rows"],
            entries["last_steps"],
            entries.get("scores", slots[:0]),
            states,
        )


def rounds(tables: Sequence[TableSync], max_bytes: int) -> Iterator[list[SyncPart]]:
    """Divides the ids of all tables into rounds. The parts of a round are exchanged together.

    Args:
        tables: the tables' syncs.
        max_bytes: maximal bytes of the rows of a round.
    """
    some: list[SyncPart] = []
    used_bytes = 0
    for table in tables:
        begin = 0
        while begin < table.ids.numel():
            max_ids = (max_bytes - used_bytes) // table.row_bytes
            if max_ids < 1 and some:
                yield some
                some, used_bytes = [], 0
                continue
            end = min(table.ids.numel(), begin + max(1, max_ids))
            some.append(SyncPart(table, slice(begin, end)))
            used_bytes += (end - begin) * table.row_bytes
            begin = end
    if some:
        yield some


def exchange(parts: Sequence[SyncPart], wire: Wire) -> None:
    """Merges parts with one all-reduce for all sums, one for all maxima and one for all counts.

    Args:
        parts: parts with the same ids in all replicas.
        wire: connection to the other replicas.
    """
    device = parts[0].table_sync.group.device
    counted = [part.n if part.table_sync.merge.adds else 0 for part in parts]
    widths = [part.n * part.table_sync.columns for part in parts]
    sums = torch.empty(sum(widths), device=device)
    heights = [part.n * part.table_sync.maxima for part in parts]
    maxima = torch.empty(sum(heights), dtype=torch.int64, device=device)
    added = torch.empty(sum(counted), dtype=torch.int64, device=device)
    matrices = [
        (of_sums.view(part.n, -1), of_maxima.view(-1, part.n), of_added if count else None)
        for part, count, of_sums, of_maxima, of_added in zip(
            parts,
            counted,
            sums.split(widths),
            maxima.split(heights),
            added.split(counted),
            strict=True,
        )
    ]
    for part, matrix in zip(parts, matrices, strict=True):
        part.fill(*matrix)
    wire.reduce(sums)
    wire.reduce(maxima, dist.ReduceOp.MAX)
    wire.reduce(added)
    for part, matrix in zip(parts, matrices, strict=True):
        part.write(*matrix)
