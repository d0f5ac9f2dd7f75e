"""Syncs replicas of hash tables by id, and of dense tables by row number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_hkv.backends.hkv.dense import DenseRows
from torchrec_hkv.backends.replicas import AveragedTensors, ReplicaSync, Synced
from torchrec_hkv.hash_table.replicas import GroupSync, check_together, sync_together


class HashTablesSync(ReplicaSync):
    """The syncs of groups of hash tables.

    Args:
        by_id: the syncs of groups with tables whose rows are merged by id.
        dense: all other tables, which are averaged.
        process_group: the ranks that hold the same shards.
    """

    def __init__(
        self,
        by_id: Sequence[GroupSync],
        dense: Sequence[DenseRows],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._by_id, self._dense = tuple(by_id), tuple(dense)
        self._process_group = process_group

    @classmethod
    def joined(cls, syncs: Sequence[HashTablesSync]) -> Sequence[HashTablesSync]:
        by_id = [sync for one in syncs for sync in one._by_id]
        dense = [rows for one in syncs for rows in one._dense]
        return [cls(by_id, dense, syncs[0]._process_group)]

    def check(self) -> None:
        if self._by_id:
            check_together(self._by_id)

    def sync(self, states: bool) -> Synced:
        done = sync_together(self._by_id, states) if self._by_id else Synced()
        tensors: list[torch.Tensor] = []
        for rows in self._dense:
            tensors += rows.read(states=False).values()
            if states:
                tensors += rows.read(states=True).values()
        return done + AveragedTensors(self._process_group).average(tensors)
