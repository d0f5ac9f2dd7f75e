"""Syncs of a backend's replicas (``docs/concepts/replicas.md``)."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import torch
import torch.distributed as dist

from torchrec_hkv.hash_table.replicas import Synced, Wire

__all__ = ["AveragedTensors", "ReplicaSync", "Synced"]

#: Maximal number of values of tensors that share a call; a larger tensor has a call of its own.
_PACKED_VALUES = 1 << 22


class ReplicaSync(abc.ABC):
    """The syncs of one group of tables on one rank."""

    @abc.abstractmethod
    def check(self) -> None:
        """Checks that a sync is possible, before anything changes. All ranks that hold the same
        shards must call it.

        Raises:
            RuntimeError: a backward is pending in a replica.
        """

    @abc.abstractmethod
    def sync(self, states: bool) -> Synced:
        """Merges the replicas, after :meth:`check`. All ranks that hold the same shards must call
        it.

        Args:
            states: whether optimizer states are merged, too.
        """

    @classmethod
    def joined(cls, syncs: Sequence[Self]) -> Sequence[ReplicaSync]:
        """Joins syncs, so that they share collective calls; by default returns them unchanged.

        Args:
            syncs: syncs of this class with the same process group.
        """
        return syncs


class AveragedTensors:
    """Averages whole tensors over replicas, as TorchRec averages stock tables.

    Args:
        process_group: the ranks that hold the same shards.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def average(self, tensors: Iterable[torch.Tensor]) -> Synced:
        """Replaces floating-point tensors by their means, and others by their maxima."""
        wire = Wire(self._process_group)
        averaged: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.is_floating_point():
                averaged.append(tensor)
            else:
                wire.reduce(tensor, dist.ReduceOp.MAX)
        for some in _packed(averaged):
            wire.average(some)
        return Synced(sent_bytes=wire.sent_bytes)


def _packed(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups tensors of one device that share a call: several small tensors, or a large one."""
    some: list[torch.Tensor] = []
    packed_values = 0
    for tensor in tensors:
        if some and (
            packed_values + tensor.numel() > _PACKED_VALUES or tensor.device != some[0].device
        ):
            yield some
            some, packed_values = [], 0
        some.append(tensor)
        packed_values += tensor.numel()
    if some:
        yield some
