"""Collective calls of the ranks that hold the same shards of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Waits until a received message has arrived, or the memory of a sent one is free again."""


def swaps(replicas: int, device_type: str) -> bool:
    """Whether replicas send each other messages instead of making collective calls.

    Two replicas on CPUs do, because collective calls are slower: they hand each message from thread
    to thread.
    """
    return replicas == 2 and device_type == "cpu"


class Wire:
    """Collective calls of the ranks that hold the same shards.

    Args:
        process_group: process group with one rank of each replica.

    Attributes:
        size: number of replicas.
        rank: number of this replica.
        sent_bytes: bytes that this rank has sent so far. A ring all-reduce of n bytes counts as
            ``2 n (size - 1) / size``.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.sent_bytes = 0

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduces in place."""
        if tensor.numel():
            self._all_reduce(tensor, op)
            size = tensor.numel() * tensor.element_size()
            self.sent_bytes += 2 * size * (self.size - 1) // self.size

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their means over replicas, computed in float32, in one call."""
        sums = torch.cat([tensor.detach().to(torch.float32).flatten() for tensor in tensors])
        self.reduce(sums)
        parts = sums.div_(self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def gather(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """All-gathers tensors of one dimension, whose lengths may differ.

        Args:
            tensor: this replica's tensor.
            lengths: the lengths of all replicas' tensors.
        """
        if self.swaps(tensor.device):
            return self._gather_two(tensor, lengths[1 - self.rank])
        padded = tensor
        if tensor.numel() < max(lengths):
            padded = tensor.new_zeros(max(lengths))
            padded[: tensor.numel()] = tensor
        gathered = self.gather_same(padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def swaps(self, device: torch.device) -> bool:
        """Whether these replicas send each other messages; see :func:`swaps`."""
        return swaps(self.size, device.type)

    def send(self, tensor: Tensor, number: int) -> Transfer:
        """Begins to send a tensor to the other of two replicas.

        Args:
            tensor: contiguous and not empty; must not change before the transfer has ended.
            number: number of the message, unique among those in flight.
        """
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return self._send(tensor, number)

    def receive(self, tensor: Tensor, number: int) -> Transfer:
        """Begins to receive a message from the other of two replicas. The message is not written to
        the network before this call.

        Args:
            tensor: contiguous, of the message's size.
            number: the number that the other replica passes to :meth:`send`.
        """
        return self._receive(tensor, number)

    def gather_same(self, tensor: Tensor) -> list[Tensor]:
        """Like :meth:`gather`, for tensors of equal lengths."""
        if self.swaps(tensor.device):
            return self._gather_two(tensor, tensor.numel())
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            self._all_gather(parts, tensor)
            self.sent_bytes += (self.size - 1) * tensor.numel() * tensor.element_size()
        return parts

    def _gather_two(self, tensor: Tensor, length: int) -> list[Tensor]:
        received = tensor.new_empty(length)
        transfers = []
        if length:
            transfers.append(self.receive(received, 0))
        if tensor.numel():
            transfers.append(self.send(tensor.contiguous(), 0))
        for transfer in transfers:
            transfer.wait()
        return [tensor, received] if self.rank == 0 else [received, tensor]

    def _send(self, tensor: Tensor, number: int) -> Transfer:
        return self._group.send([tensor], 1 - self.rank, number)

    def _receive(self, tensor: Tensor, number: int) -> Transfer:
        return self._group.recv([tensor], 1 - self.rank, number)

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(tensor, op, group=self._group)

    def _all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        dist.all_gather(parts, tensor, group=self._group)
