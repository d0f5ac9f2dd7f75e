"""One sync of the replicas of a group of tables; ``docs/concepts/replicas.md`` has the rules."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import EvictionPolicy, keeps_scores, sums_scores
from torchrec_hkv.hash_table.files.file_tables import Target
from torchrec_hkv.hash_table.files.state_columns import StateColumns
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initial_rows import initial_rows
from torchrec_hkv.hash_table.replicas.changes import Changed, ReplicaChanges, find_slots
from torchrec_hkv.hash_table.replicas.merging import ScoreMerge, merged_values
from torchrec_hkv.hash_table.replicas.wire import Wire
from torchrec_hkv.hash_table.stored_rows import numbers_of, stored_as

_ops = torch.ops.torchrec_hkv
#: Memory that rows on their way may take, on the host and on the device.
BATCH_BYTES = 64 << 20
_STEP_BITS = 0xFFFFFFFF
# Copies of a batch that are alive at once: what is read, what is sent, what comes of it.
_COPIES = 4


@dataclasses.dataclass(frozen=True)
class Synced:
    """What a sync did on a rank.

    Attributes:
        touched: ids that some replica had touched, column shards counted each.
        erased: ids that left here since they had left another replica.
        lost: ids that found no place here, or lost it to others.
        sent_bytes: that this rank sent, counting a ring all-reduce of n bytes as
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


def id_sync_bytes(
    touched: float,
    touched_anywhere: float,
    dim: int,
    state_dim: int,
    eviction: EvictionPolicy,
    replicas: int,
) -> float:
    """Bytes that a rank sends for a table in a sync, as :attr:`Synced.sent_bytes` counts them.

    Args:
        touched: ids that this replica has touched.
        touched_anywhere: ids that some replica has touched.
        dim: columns.
        state_dim: float32 values of optimizer state of a row.
        eviction: the policy.
        replicas: how many.
    """
    numbers = 1 + keeps_scores(eviction) + sums_scores(eviction)
    reduced = touched_anywhere * (4 * (dim + state_dim + 2) + 8 * numbers)
    return 8 * touched * (replicas - 1) + 2 * reduced * (replicas - 1) / replicas


class GroupSync:
    """Brings the replicas of a group's tables together.

    Args:
        group: this replica's.
        tables: indices of those that are reconciled by id; all replicas give the same.
        wire: to the other replicas.
        batch_bytes: memory that a sync may take, on the host and on the device, besides 8 bytes for
            each id that changed in each replica, and the rows of ids that are new to this one.
    """

    def __init__(
        self,
        group: TableGroup,
        tables: Sequence[int],
        wire: Wire,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._group, self._tables = group, tuple(tables)
        self._wire = wire
        self._changes = {table: ReplicaChanges(group, table, batch_bytes) for table in self._tables}
        self._batch_bytes = batch_bytes

    def sync(self, states: bool = True) -> Synced:
        """Applies the rules, after :meth:`check`; a collective call of the ranks that hold the same
        shards.

        Args:
            states: whether optimizer states are reconciled. Otherwise they stay, and those of ids
                that are inserted are 0.
        """
        wire, group = self._wire, self._group
        if wire.size == 1:
            return Synced()
        sent_before = wire.sent_bytes
        with group.alone():
            looks = [self._changes[table].look() for table in self._tables]
            self._agree_on_steps(wire)
            known = self._gather_ids(wire, looks)
            done = Synced()
            for table, look, ids in zip(self._tables, looks, known, strict=True):
                done += _TableSync(
                    group, table, self._changes[table], wire, states, self._batch_bytes
                ).run(look, *ids)
            for changes in self._changes.values():
                changes.synced()
        return dataclasses.replace(done, sent_bytes=wire.sent_bytes - sent_before)

    def check(self) -> None:
        """Refuses a sync; a collective call of the same ranks.

        Raises:
            RuntimeError: in a replica a backward is still to come.
        """
        wire, group = self._wire, self._group
        if group.first_open_step <= group.clock:
            gc.collect()  # a lookup pins its rows until its graph is gone, which may be garbage
        pending = torch.zeros(wire.size, dtype=torch.int64, device=group.device)
        pending[wire.rank] = group.first_open_step <= group.clock
        wire.reduce(pending)
        if pending.any():
            names = ", ".join(repr(group.tables[table].name) for table in self._tables)
            raise RuntimeError(
                f"The backward of a lookup in tables {names} is still to come, in replicas "
                f"{pending.nonzero().flatten().tolist()}: call sync() after the backward, and "
                "before the next lookup in training."
            )

    def _agree_on_steps(self, wire: Wire) -> None:
        """Clock and numbers of updates: the highest."""
        group = self._group
        own = torch.tensor([group.clock], device=group.device)
        steps = torch.cat([own, group.optimizer_steps])
        wire.reduce(steps, dist.ReduceOp.MAX)
        group.advance_clock(int(steps[0]))
        for table in self._tables:
            group.optimizer_steps[table] = steps[1 + table]

    def _gather_ids(
        self, wire: Wire, looks: Sequence[Changed]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each table: ids that are touched somewhere, ascending; whether some replica that
        touched or lost them had them at the last sync; ids that left and are touched nowhere."""
        kinds = [ids for look in looks for ids in (look.new, look.old, look.left)]
        device = self._group.device
        sizes = torch.tensor([ids.numel() for ids in kinds], device=device)
        of_replicas = [size.tolist() for size in wire.gather_same(sizes)]
        gathered = [
            part.split(size)
            for part, size in zip(wire.gather(torch.cat(kinds)), of_replicas, strict=True)
        ]
        tables = []
        for first in range(0, len(kinds), 3):
            new, old, left = (
                torch.cat([parts[first + kind] for parts in gathered]).unique() for kind in range(3)
            )
            touched = torch.cat([new, old]).unique()
            known = torch.isin(touched, old) | torch.isin(touched, left)
            tables.append((touched, known, left[~torch.isin(left, touched)]))
        return tables


class _TableSync:
    """One sync of one table."""

    def __init__(
        self,
        group: TableGroup,
        table: int,
        changes: ReplicaChanges,
        wire: Wire,
        states: bool,
        batch_bytes: int,
    ) -> None:
        self._group, self._table, self._changes, self._wire = group, table, changes, wire
        self._spec = group.tables[table]
        dim, self._dtype, width, self._scored, _, _ = _C.table_layout(group.handle, table)
        self._width = width if states else 0
        self._states = states
        parts = StateColumns.of_layout(group.state_layout)
        # The optimizer's own count of a row's updates comes last (csrc/common/optimizers.h).
        has_own_step = states and group.state_layout >= 256
        used = parts.of_columns * dim + parts.of_rows
        self._own_step = dim + used - 1 if has_own_step else None
        self._merge = ScoreMerge(self._spec)
        row_bytes = 4 * (dim + self._width + 2) + 8 * (1 + 2 * self._scored) + 8
        self._batch = max(1, batch_bytes // (_COPIES * row_bytes))

    def run(self, look: Changed, touched: Tensor, known: Tensor, left: Tensor) -> Synced:
        """
        Args:
            look: what changed here.
            touched: ids that are touched somewhere, ascending.
            known: whether they were there at the last sync, as far as they were not just kept.
            left: ids that leave.
        """
        group, table, changes = self._group, self._table, self._changes
        slots = find_slots(group, table, left)
        slots = slots[slots >= 0]
        first = sum(group.full_slots(t) for t in range(table))
        _ops.erase_slots(group.counter_tensor, group.handle, slots + first)
        changes.erased(slots)
        new: list[dict[str, Tensor]] = []
        for ids, is_known in (
            zip(touched.split(self._batch), known.split(self._batch), strict=True)
            if touched.numel()
            else ()
        ):
            new.append(self._merge_batch(look, ids, is_known))
        lost = self._insert(new)
        return Synced(touched.numel(), slots.numel(), lost)

    def _merge_batch(self, look: Changed, ids: Tensor, known: Tensor) -> dict[str, Tensor]:
        """Merges ids and writes those that are here; returns the entries of all others."""
        group, table, spec = self._group, self._table, self._spec
        slots = find_slots(group, table, ids)
        there = (slots >= 0).nonzero().flatten()
        at = slots[there]
        held, rows, last_steps, scores, states = _ops.read_slots(group.handle, table, at)
        is_new, is_old = torch.isin(held, look.new), torch.isin(held, look.old)
        n, device = ids.numel(), ids.device

        dim = spec.dim
        given = torch.empty((held.numel(), dim + self._width + 2), device=device)
        given[:, :dim] = numbers_of(rows, dim)
        if self._states:
            given[:, dim:-2] = states
        given[:, -2] = 1.0
        given[:, -1] = ~is_new
        sums = given
        if held.numel() < n:
            sums = torch.zeros((n, given.shape[1]), device=device)
            sums[there] = given
        highest = torch.zeros(
            (n, 1 + self._scored + (self._own_step is not None)), dtype=torch.int64
        )
        highest = highest.to(device)
        highest[there, 0] = last_steps.long() & _STEP_BITS
        added = None
        if self._own_step is not None:
            highest[there, -1] = states[:, self._own_step - dim].long()
        if self._scored:
            before = torch.zeros_like(held)
            if look.old_scores is not None and look.old.numel():
                place = torch.searchsorted(look.old, held[is_old])
                before[is_old] = look.old_scores[place]
            touched = is_new | is_old
            highest[:, 1] = self._merge.lowest(n, device)
            highest[there, 1] = self._merge.highest_of(scores, before, touched)
            if self._merge.adds:
                added = torch.zeros(n, dtype=torch.int64, device=device)
                added[there] = self._merge.added(scores, before, touched)
        self._wire.reduce(sums)
        self._wire.reduce(highest, dist.ReduceOp.MAX)
        if added is not None:
            self._wire.reduce(added)

        def initial(places: Tensor) -> Tensor:
            return initial_rows(
                ids[places],
                spec.dim,
                table=spec.name,
                seed=spec.seed,
                initializer=spec.initializer,
                column_offset=spec.column_offset,
            )

        values = merged_values(sums, self._wire.size, known, initial)
        if self._own_step is not None:
            values[:, self._own_step] = highest[:, -1].float()
        entries = {
            "ids": ids,
            "rows": stored_as(values[:, : spec.dim], self._dtype),
            "last_steps": highest[:, 0].to(torch.int32),
        }
        if self._states:
            entries["states"] = values[:, spec.dim :]
        if self._scored:
            entries["scores"] = self._merge.merged(highest[:, 1], added)
        own = {name: tensor[there].contiguous() for name, tensor in entries.items()}
        _ops.overwrite_slots(
            group.counter_tensor,
            group.handle,
            table,
            at,
            own["ids"],
            own["rows"],
            own["last_steps"],
            own["scores"] if self._scored else scores,
            own["states"] if self._states else states,
        )
        self._changes.wrote(at)
        absent = (slots < 0).nonzero().flatten()
        return {name: tensor[absent].contiguous() for name, tensor in entries.items()}

    def _insert(self, batches: list[dict[str, Tensor]]) -> int:
        """Inserts what other replicas have; returns how many ids have no place in the end.

        At the end of all: an id that is displaced has been read before.
        """
        ids = [batch["ids"] for batch in batches]
        number = sum(part.numel() for part in ids)
        if number:
            group, table = self._group, self._table
            target = Target(group, table, self._batch_bytes_of_target)
            group.reserve(table, min(group.sizes()[table] + number, target.capacity))
            self._changes.grew()
            target = Target(group, table, self._batch_bytes_of_target)
            for batch in batches:
                if batch["ids"].numel():
                    target.restore(batch, exact=False)
        return self._changes.inserted(
            torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=self._group.device)
        )

    #: Batches are as large as they are.
    _batch_bytes_of_target = 1 << 20
