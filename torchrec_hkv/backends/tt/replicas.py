"""Replicas of Tensor-Train tables: cores are averaged whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.backends.replicas import AveragedTensors, ReplicaSync, Synced


class CoresSync(ReplicaSync):
    """The syncs of groups of Tensor-Train tables.

    Args:
        cores: cores of all tables of this replica.
        states: states of the optimizers, and numbers of updates so far.
        process_group: the ranks that hold the same tables.
    """

    def __init__(
        self,
        cores: Sequence[Tensor],
        states: Sequence[Tensor],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._cores, self._states = tuple(cores), tuple(states)
        self._process_group = process_group

    @classmethod
    def joined(cls, syncs: Sequence[CoresSync]) -> Sequence[CoresSync]:
        cores = [core for one in syncs for core in one._cores]
        states = [state for one in syncs for state in one._states]
        return [cls(cores, states, syncs[0]._process_group)]

    def check(self) -> None:
        """Does nothing: a sync is always possible."""

    def sync(self, states: bool) -> Synced:
        averages = AveragedTensors(self._process_group)
        return averages.average((*self._cores, *(self._states if states else ())))
