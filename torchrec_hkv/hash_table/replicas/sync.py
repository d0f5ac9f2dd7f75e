"""One sync of the replicas of groups of tables; ``docs/concepts/replicas.md`` has the rules."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import EvictionPolicy, keeps_scores, sums_scores
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.replicas.changes import ChangedIds, ReplicaChanges
from torchrec_hkv.hash_table.replicas.ids import MergedIds, merge_ids
from torchrec_hkv.hash_table.replicas.swap import swap_rows
from torchrec_hkv.hash_table.replicas.sync_part import exchange, rounds
from torchrec_hkv.hash_table.replicas.table_sync import Synced, TableSync
from torchrec_hkv.hash_table.replicas.wire import Wire

#: Memory limit of rows in flight, on the host and on the device each.
BATCH_BYTES = 64 << 20
# Number of copies of a batch that are alive at once, such as the sent, the merged and the inserted.
_COPIES = 4
#: Maximal number of ids in the message with clocks and sizes.
_MAX_ROOM = 1 << 17


def id_sync_bytes(
    touched: float,
    touched_anywhere: float,
    dim: int,
    state_dim: int,
    eviction: EvictionPolicy,
    replicas: int,
    *,
    own_steps: bool = False,
    swaps: bool = False,
) -> float:
    """Bytes that a rank sends for a table in a sync, as :attr:`Synced.sent_bytes` counts them,
    without the few bytes that all tables of a group share.

    Args:
        touched: number of ids that this replica has touched.
        touched_anywhere: number of ids that some replica has touched.
        dim: number of columns.
        state_dim: number of float32 values of optimizer state of a row.
        eviction: eviction policy.
        replicas: number of replicas.
        own_steps: whether the optimizer counts the updates of each row.
        swaps: whether the replicas send each other messages (:func:`~.wire.swaps`).
    """
    numbers = keeps_scores(eviction) + sums_scores(eviction)
    if not swaps:
        numbers += 1 + own_steps  # in a message these are columns
    exchanged = touched_anywhere * (4 * (dim + state_dim + 2) + 8 * numbers)
    return 8 * touched * (replicas - 1) + 2 * exchanged * (replicas - 1) / replicas


class GroupSync:
    """Merges the replicas of a group's tables.

    Args:
        group: this replica's group.
        tables: indices of the tables that are merged by id, the same in all replicas.
        wire: connection to the other replicas.
        batch_bytes: memory limit in bytes, on the host and on the device each, without 8 bytes for
            each id that changed in each replica, and without the rows of ids that are new here.
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
        self._first_call_ids = (
            0  # number of ids that the first call sends; from the last sync's number
        )

    @property
    def group(self) -> TableGroup:
        """This replica's group."""
        return self._group

    def sync(self, states: bool = True) -> Synced:
        """Syncs, after :meth:`check`. All ranks that hold the same shards must call it.

        Args:
            states: whether optimizer states are merged. Otherwise they stay, and inserted ids get
                states of 0.
        """
        return sync_together([self], states)

    def check(self) -> None:
        """Checks that a sync is possible. All ranks that hold the same shards must call it.

        Raises:
            RuntimeError: the backward of a lookup is pending in a replica.
        """
        check_together([self])

    def _is_pending(self) -> bool:
        """Whether a backward is pending in this replica."""
        group = self._group
        if group.first_open_step <= group.clock:
            gc.collect()  # a lookup pins its rows until its graph is freed; it may be garbage
        return group.first_open_step <= group.clock

    def _find_changes(self) -> list[ChangedIds]:
        """Finds what changed in each table."""
        return [self._changes[table].find_changes() for table in self._tables]

    def _clock_values(self) -> Tensor:
        """The number of updates of each table, and the clock."""
        steps = self._group.optimizer_steps
        return torch.cat([steps, steps.new_tensor([self._group.clock])])

    def _synchronize_clock(self, heads: Sequence[Sequence[int]]) -> None:
        """Sets the clock and the numbers of updates to the maxima over all replicas.

        Args:
            heads: the result of :meth:`_clock_values` in each replica.
        """
        *steps, clock = (max(numbers) for numbers in zip(*heads, strict=True))
        head = heads[self._wire.rank]
        for table in self._tables:
            if steps[table] != head[table]:
                self._group.optimizer_steps[table] = steps[table]
        if clock != head[-1]:
            self._group.advance_clock(clock)

    def _table_syncs(
        self, changes: Sequence[ChangedIds], merged_ids: Sequence[MergedIds], states: bool
    ) -> list[TableSync]:
        size = self._wire.size
        return [
            TableSync(self._group, table, self._changes[table], size, states, table_changes, ids)
            for table, table_changes, ids in zip(self._tables, changes, merged_ids, strict=True)
        ]

    def _end(self) -> None:
        for changes in self._changes.values():
            changes.on_sync()


def check_together(syncs: Sequence[GroupSync]) -> None:
    """Checks that a sync of several groups is possible. All ranks that hold the same shards must
    call it.

    Args:
        syncs: syncs of groups on one device, with wires to the same replicas. The wire of the first
            is used.

    Raises:
        RuntimeError: the backward of a lookup is pending in a replica.
    """
    wire, device = syncs[0]._wire, syncs[0].group.device
    pending = torch.zeros((len(syncs), wire.size), dtype=torch.int64, device=device)
    pending[:, wire.rank] = torch.tensor([sync._is_pending() for sync in syncs])
    wire.reduce(pending)
    for sync, replicas in zip(syncs, pending.tolist(), strict=True):
        if any(replicas):
            names = ", ".join(repr(sync.group.tables[table].name) for table in sync._tables)
            raise RuntimeError(
                f"The backward of a lookup in tables {names} has not run, in replicas "
                f"{[replica for replica, is_pending in enumerate(replicas) if is_pending]}: call "
                "sync() after the backward, and before the next lookup in training."
            )


def sync_together(syncs: Sequence[GroupSync], states: bool = True) -> Synced:
    """Merges the replicas of several groups. Their tables share all calls and messages.

    Args:
        syncs: as for :func:`check_together`, which is called before.
        states: as for :meth:`GroupSync.sync`.
    """
    wire, device = syncs[0]._wire, syncs[0].group.device
    if wire.size == 1:
        return Synced()
    sent_before = wire.sent_bytes
    max_bytes = min(sync._batch_bytes for sync in syncs) // _COPIES
    with contextlib.ExitStack() as locks:
        for sync in syncs:
            locks.enter_context(sync.group.alone())
        changes = [sync._find_changes() for sync in syncs]
        merged_ids = _gather_ids(syncs, changes, wire)
        tables = [
            table
            for sync, *of_sync in zip(syncs, changes, merged_ids, strict=True)
            for table in sync._table_syncs(*of_sync, states)
        ]
        if wire.swaps(device):
            swap_rows(tables, wire, max_bytes)
        else:
            for some in rounds(tables, max_bytes):
                exchange(some, wire)
        done = sum((table.finish() for table in tables), Synced())
        for sync in syncs:
            sync._end()
    return dataclasses.replace(done, sent_bytes=wire.sent_bytes - sent_before)


def _gather_ids(
    syncs: Sequence[GroupSync], changes: Sequence[Sequence[ChangedIds]], wire: Wire
) -> list[list[MergedIds]]:
    """Merges the ids of each table. Sets clocks and numbers of updates to their maxima."""
    changed = list(itertools.chain.from_iterable(changes))
    kinds = [
        n
        for table_changes in changed
        for n in (
            table_changes.num_new,
            table_changes.touched.numel() - table_changes.num_new,
            table_changes.removed.numel(),
        )
    ]
    heads = [sync._clock_values() for sync in syncs]
    widths = [head.numel() for head in heads]
    begin, first_call_ids = sum(widths) + len(kinds), syncs[0]._first_call_ids  # of ids
    number = sum(kinds)
    parts = [*heads, heads[0].new_tensor(kinds)]
    parts += [
        ids
        for table_changes in changed
        for ids in (table_changes.touched, table_changes.removed)
        if ids.numel()
    ]
    if number < first_call_ids:
        parts.append(heads[0].new_zeros(first_call_ids - number))
    local_ids = torch.cat(parts)
    messages = wire.gather_same(local_ids[: begin + first_call_ids])
    heads_of = torch.stack([message[:begin] for message in messages]).tolist()
    at = 0
    for sync, width in zip(syncs, widths, strict=True):
        sync._synchronize_clock([head[at : at + width] for head in heads_of])
        at += width
    sizes_of = [head[at:] for head in heads_of]
    lengths = [sum(lengths_of_sync) for lengths_of_sync in sizes_of]
    of_replicas = [
        message[begin : begin + length] for message, length in zip(messages, lengths, strict=True)
    ]
    if max(lengths) > first_call_ids:
        rest = wire.gather(
            local_ids[begin + first_call_ids :],
            [max(0, length - first_call_ids) for length in lengths],
        )
        of_replicas = [torch.cat(both) for both in zip(of_replicas, rest, strict=True)]
    syncs[0]._first_call_ids = min(_MAX_ROOM, max(lengths) * 9 // 8)
    tables = [(sync._group, table) for sync in syncs for table in sync._tables]
    merged = []
    begins = [0] * wire.size
    for number, (place, table_changes) in enumerate(zip(tables, changed, strict=True)):
        sizes = [lengths_of_sync[3 * number : 3 * number + 3] for lengths_of_sync in sizes_of]
        ends = [
            begin + sum(lengths_of_sync)
            for begin, lengths_of_sync in zip(begins, sizes, strict=True)
        ]
        ids = [
            of_replica[begin:end]
            for of_replica, begin, end in zip(of_replicas, begins, ends, strict=True)
        ]
        merged.append(merge_ids(*place, table_changes, ids, sizes, wire.rank))
        begins = ends
    of_tables = iter(merged)
    return [list(itertools.islice(of_tables, len(of_sync))) for of_sync in changes]
