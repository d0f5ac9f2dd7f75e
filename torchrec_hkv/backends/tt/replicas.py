"""Replicas of Tensor-Train tables: cores are averaged whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.backends.replicas import AveragedTensors, ReplicaSync, Synced


class CoresSync(ReplicaSync):
    """A group of Tensor-Train tables.

    Args:
        cores: cores of all tables of this replica.
        states: states of the optimizer.
        step: int64 ``[1]``, updates so far.
        process_group: the ranks that hold the same tables.
    """

    def __init__(
        self,
        cores: Sequence[Tensor],
        states: Sequence[Tensor],
        step: Tensor,
        process_group: dist.ProcessGroup,
    ) -> None:
        self._cores, self._states = tuple(cores), (*states, step)
        self._averages = AveragedTensors(process_group)

    def check(self) -> None:
        """Refuses none."""

    def sync(self, states: bool) -> Synced:
        return self._averages.average((*self._cores, *(self._states if states else ())))
