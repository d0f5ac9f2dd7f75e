"""How a backend brings replicas of its tables together (``docs/concepts/replicas.md``)."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchrec_hkv.hash_table.replicas import Synced, Wire

__all__ = ["AveragedTensors", "ReplicaSync", "Synced"]


class ReplicaSync(abc.ABC):
    """The syncs of one group of tables on one rank."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuses a sync before anything changes; a collective call of the ranks that hold the same
        shards.

        Raises:
            RuntimeError: a backward is still to come, in some replica.
        """

    @abc.abstractmethod
    def sync(self, states: bool) -> Synced:
        """Brings the replicas together, after :meth:`check`; a collective call of the same ranks.

        Args:
            states: whether optimizer states are reconciled, too.
        """


class AveragedTensors:
    """Tensors that are averaged whole, as TorchRec does it for stock tables.

    Args:
        process_group: the ranks that hold the same shards.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def average(self, tensors: Iterable[torch.Tensor]) -> Synced:
        """Replaces floating-point tensors by their means, and others by their maxima."""
        wire = Wire(self._process_group)
        for tensor in tensors:
            if tensor.is_floating_point():
                wire.average(tensor)
            else:
                wire.reduce(tensor, dist.ReduceOp.MAX)
        return Synced(sent_bytes=wire.sent_bytes)
