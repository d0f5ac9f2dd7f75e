"""One sync of the replicas of a group of tables; ``docs/concepts/replicas.md`` has the rules."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import EvictionPolicy, keeps_scores, sums_scores
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.replicas.changes import Changed, ReplicaChanges
from torchrec_hkv.hash_table.replicas.ids import MergedIds, merge_ids
from torchrec_hkv.hash_table.replicas.swap import swap_rows
from torchrec_hkv.hash_table.replicas.table_sync import Synced, TableSync, exchange, rounds
from torchrec_hkv.hash_table.replicas.wire import Wire

#: Memory that rows on their way may take, on the host and on the device.
BATCH_BYTES = 64 << 20
# Copies of a batch that are alive at once: what is sent, what comes of it, what is inserted.
_COPIES = 4
#: Ids that the message with clocks and sizes may have room for.
_MOST_ROOM = 1 << 14


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
    """Bytes that a rank sends for a table in a sync, as :attr:`Synced.sent_bytes` counts them, but
    for the few that all tables of a group share.

    Args:
        touched: ids that this replica has touched.
        touched_anywhere: ids that some replica has touched.
        dim: columns.
        state_dim: float32 values of optimizer state of a row.
        eviction: the policy.
        replicas: how many.
        own_steps: whether the optimizer counts the updates of each row.
        swaps: whether the replicas send each other messages (:func:`~.wire.swaps`).
    """
    numbers = keeps_scores(eviction) + sums_scores(eviction)
    if not swaps:
        numbers += 1 + own_steps  # a message has them among the columns
    exchanged = touched_anywhere * (4 * (dim + state_dim + 2) + 8 * numbers)
    return 8 * touched * (replicas - 1) + 2 * exchanged * (replicas - 1) / replicas


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
        self._room = 0  # for as many ids as came the last time, so that one call is enough

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
            merged = self._gather_ids(looks)
            tables = [
                TableSync(group, table, self._changes[table], wire.size, states, look, ids)
                for table, look, ids in zip(self._tables, looks, merged, strict=True)
            ]
            if wire.swaps(group.device):
                swap_rows(tables, wire, self._batch_bytes // _COPIES)
            else:
                for some in rounds(tables, self._batch_bytes // _COPIES):
                    exchange(some, wire)
            done = sum((table.finish() for table in tables), Synced())
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

    def _gather_ids(self, looks: Sequence[Changed]) -> list[MergedIds]:
        """Merges the ids of each table. Clock and numbers of updates become the highest."""
        group, wire = self._group, self._wire
        kinds = [
            ids
            for look in looks
            for ids in (look.touched[: look.num_new], look.touched[look.num_new :], look.left)
        ]
        sizes = torch.tensor([group.clock, *map(len, kinds)], device=group.device)
        ids, room = torch.cat(kinds), self._room
        own = torch.cat([group.optimizer_steps, sizes, ids[:room]])
        begin = len(group.tables) + len(sizes)  # of ids
        messages = wire.gather_same(_padded(own, begin + room))
        heads = torch.stack([part[:begin] for part in messages])
        updates = len(group.tables)
        tables = list(self._tables)
        group.optimizer_steps[tables] = heads[:, tables].amax(dim=0)
        of_replicas = heads[:, updates:].tolist()
        group.advance_clock(max(clock for clock, *_ in of_replicas))
        lengths = [sum(sizes) for _, *sizes in of_replicas]
        parts = [
            part[begin : begin + length] for part, length in zip(messages, lengths, strict=True)
        ]
        if max(lengths) > room:
            rest = wire.gather(ids[room:], [max(0, length - room) for length in lengths])
            parts = [torch.cat(both) for both in zip(parts, rest, strict=True)]
        self._room = min(_MOST_ROOM, max(lengths) * 9 // 8)
        gathered = [part.split(sizes) for part, (_, *sizes) in zip(parts, of_replicas, strict=True)]
        return [
            merge_ids([parts[first : first + 3] for parts in gathered], wire.rank)
            for first in range(0, len(kinds), 3)
        ]


def _padded(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - tensor.numel())])
