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
        of: the table's sync.
        own: the range in ``of.ids``.
    """

    def __init__(self, of: TableSync, own: slice) -> None:
        self.of, self._own = of, own
        self.n = own.stop - own.start

    @property
    def _slots(self) -> Tensor:
        return self.of.slots[self._own]

    @property
    def words(self) -> int:
        """Number of int64 values of its records and scores in a message."""
        return (self.n * self.of.record_columns + 1) // 2 + self.n * self.of.numbers

    def _numbers(self, message: Tensor, begin: int) -> Sequence[Tensor]:
        """Views of the scores in a message; none for tables without scores.

        The first view has the numbers that are maximized. Under policies that sum scores, a second
        view has the numbers that are summed.
        """
        of = self.of
        if not of.numbers:
            return ()
        end = begin + self.words
        return message[end - self.n * of.numbers : end].view(of.numbers, self.n).unbind()

    def pack(self, message: Tensor, begin: int) -> None:
        """Writes this replica's entries to a message for the other of two replicas.

        Args:
            message: int64; gets the records, then the numbers.
            begin: offset of the part in the message.
        """
        of, own = self.of, self._own
        at = (own.start, own.stop, message, begin)
        scores = _ops.pack_records(of.group.handle, of.table, of.slots, of.is_new, *at, of.states)
        if of.numbers:
            self._score(scores, self._slots >= 0, *self._numbers(message, begin))

    def merge(self, message: Tensor, theirs: Tensor, begin: int) -> None:
        """Merges two messages, writes the ids that are in this replica and keeps the others.

        Args:
            message: this replica's message; overwritten.
            theirs: the other replica's message.
            begin: offset of the part in both messages.
        """
        of, own = self.of, self._own
        numbers = self._numbers(message, begin)
        scores = of.no_scores
        if numbers:
            highest, *added = numbers
            their_highest, *their_added = self._numbers(theirs, begin)
            torch.maximum(highest, their_highest, out=highest)
            sums = [own.add_(other) for own, other in zip(added, their_added, strict=True)]
            scores = of.merge.merged(highest, *(sums or [None]))
        _ops.merge_records(
            of.group.counter_tensor,
            of.group.handle,
            of.table,
            of.slots,
            of.ids,
            of.known,
            own.start,
            own.stop,
            message,
            theirs,
            begin,
            scores,
            of.states,
            -1 if of.own_step is None else of.own_step,
        )
        if not of.all_here:
            records = message[begin:].view(torch.float32)[: self.n * of.record_columns]
            self._keep_absent(records.view(self.n, -1), scores)

    def _keep_absent(self, records: Tensor, scores: Tensor) -> None:
        """Keeps merged records of ids that are not in this replica, to insert them later."""
        of = self.of
        absent = (self._slots < 0).nonzero().flatten()
        if absent.numel() == 0:
            return
        kept, dim = records[absent], of.spec.dim
        entries = {
            "ids": of.ids[self._own][absent],
            "rows": stored_as(kept[:, :dim], of.dtype).contiguous(),
            "last_steps": kept[:, -2].contiguous().view(torch.int32),
        }
        if of.states:
            entries["states"] = kept[:, dim:-2].contiguous()
        if of.scored:
            entries["scores"] = scores[absent]
        of.keep(entries)

    def _score(
        self, scores: Tensor, there: Tensor, highest: Tensor, added: Tensor | None = None
    ) -> None:
        """Writes the numbers that are maximized to ``highest``, and summed to ``added``."""
        of = self.of
        touched = of.is_touched[self._own]
        before = torch.zeros_like(scores) if of.before is None else of.before[self._own]
        of_policy = of.merge.highest_of(scores, before, touched)
        highest[:] = torch.where(there, of_policy, of.merge.lowest(self.n, there.device))
        if added is not None:
            added[:] = torch.where(there, of.merge.added(scores, before, touched), 0)

    def fill(self, sums: Tensor, maxima: Tensor, added: Tensor | None) -> None:
        """Writes this replica's entries, to be summed and maximized over replicas.

        Args:
            sums: float32 ``[n, columns]``.
            maxima: int64 ``[maxima, n]``.
            added: int64 ``[n]``; None if the policy does not sum scores.
        """
        of, there = self.of, self._slots >= 0
        last_steps, scores = self._read(sums)
        sums[:, -2] = there
        sums[:, -1] = there & ~of.is_new[self._own]
        maxima[0] = last_steps
        maxima[0] &= _STEP_BITS
        if of.own_step is not None:
            maxima[-1] = sums[:, of.own_step]
        if of.scored:
            self._score(scores, there, maxima[1], added)

    def _read(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last steps and scores; writes rows and states to ``sums``. Ids that are not in
        this replica get zeros."""
        of = self.of
        if of.dtype == torch.float32:
            place = (of.group.handle, of.table)
            return _ops.read_values(*place, self._slots, sums, of.states)
        there = (self._slots >= 0).nonzero().flatten()
        _, rows, last_steps, scores, states = _ops.read_slots(
            of.group.handle, of.table, self._slots[there]
        )
        sums.zero_()
        dim = of.spec.dim
        sums[there, :dim] = numbers_of(rows, dim).to(torch.float32)
        if of.states:
            sums[there, dim:-2] = states
        steps_of_all = last_steps.new_zeros(self.n)
        steps_of_all[there] = last_steps
        scores_of_all = scores.new_zeros(self.n if of.scored else 0)
        if of.scored:
            scores_of_all[there] = scores
        return steps_of_all, scores_of_all

    def write(self, sums: Tensor, maxima: Tensor, added: Tensor | None) -> None:
        """Merges, writes the ids that are in this replica and keeps the others.

        Args:
            sums: see :meth:`fill`, over all replicas; overwritten, like the other arguments.
            maxima: see :meth:`fill`.
            added: see :meth:`fill`.
        """
        of, spec = self.of, self.of.spec
        ids = of.ids[self._own]

        def initial(places: Tensor) -> Tensor:
            return initial_rows(
                ids[places],
                spec.dim,
                table=spec.name,
                seed=spec.seed,
                initializer=spec.initializer,
                column_offset=spec.column_offset,
            )

        values = merged_values(sums, of.replicas, of.known[self._own], initial)
        if of.own_step is not None:
            values[:, of.own_step] = maxima[-1]
        last_steps = maxima[0].to(torch.int32)
        scores = of.merge.merged(maxima[1], added) if of.scored else ids[:0]
        if of.dtype == torch.float32:
            place = (of.group.counter_tensor, of.group.handle, of.table)
            _ops.write_values(*place, self._slots, ids, values, last_steps, scores, of.states)
        entries = {
            "ids": ids,
            "rows": stored_as(values[:, : spec.dim], of.dtype),
            "last_steps": last_steps,
        }
        if of.states:
            entries["states"] = values[:, spec.dim :]
        if of.scored:
            entries["scores"] = scores
        if of.dtype != torch.float32:
            there = (self._slots >= 0).nonzero().flatten()
            self._overwrite({name: tensor[there] for name, tensor in entries.items()}, there)
        if of.all_here:
            return
        absent = (self._slots < 0).nonzero().flatten()
        of.keep({name: tensor[absent] for name, tensor in entries.items()})

    def _overwrite(self, entries: dict[str, Tensor], there: Tensor) -> None:
        """Overwrites the entries that are in this replica; for rows of any dtype."""
        of, slots = self.of, self._slots[there]
        group, table = of.group, of.table
        states = entries["states"] if of.states else _ops.read_slots(group.handle, table, slots)[4]
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
    taken = 0
    for table in tables:
        begin = 0
        while begin < table.ids.numel():
            room = (max_bytes - taken) // table.row_bytes
            if room < 1 and some:
                yield some
                some, taken = [], 0
                continue
            end = min(table.ids.numel(), begin + max(1, room))
            some.append(SyncPart(table, slice(begin, end)))
            taken += (end - begin) * table.row_bytes
            begin = end
    if some:
        yield some


def exchange(parts: Sequence[SyncPart], wire: Wire) -> None:
    """Merges parts with one all-reduce for all sums, one for all maxima and one for all counts.

    Args:
        parts: parts with the same ids in all replicas.
        wire: connection to the other replicas.
    """
    device = parts[0].of.group.device
    counted = [part.n if part.of.merge.adds else 0 for part in parts]
    widths = [part.n * part.of.columns for part in parts]
    sums = torch.empty(sum(widths), device=device)
    heights = [part.n * part.of.maxima for part in parts]
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
    for part, own in zip(parts, matrices, strict=True):
        part.fill(*own)
    wire.reduce(sums)
    wire.reduce(maxima, dist.ReduceOp.MAX)
    wire.reduce(added)
    for part, own in zip(parts, matrices, strict=True):
        part.write(*own)
