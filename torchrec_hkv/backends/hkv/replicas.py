"""Replicas of hash tables: rows by id; those of dense tables by number."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from torchrec_hkv.backends.hkv.dense import DenseRows
from torchrec_hkv.backends.replicas import AveragedTensors, ReplicaSync, Synced
from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.replicas import GroupSync, Wire


class HashTablesSync(ReplicaSync):
    """A group of hash tables.

    Args:
        group: group of this replica.
        by_id: indices of the tables whose rows are reconciled by id.
        dense: all others.
        process_group: the ranks that hold the same shards.
    """

    def __init__(
        self,
        group: TableGroup,
        by_id: Sequence[int],
        dense: Sequence[DenseRows],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._by_id = GroupSync(group, by_id, Wire(process_group)) if by_id else None
        self._dense = tuple(dense)
        self._averages = AveragedTensors(process_group)

    def check(self) -> None:
        if self._by_id is not None:
            self._by_id.check()

    def sync(self, states: bool) -> Synced:
        done = Synced()
        if self._by_id is not None:
            done += self._by_id.sync(states)
        for rows in self._dense:
            tensors = dict(rows.read(states=False))
            if states:
                tensors |= rows.read(states=True)
            done += self._averages.average(tensors.values())
        return done
