"""Collective calls of the ranks that hold the same shards of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """Collective calls of the ranks that hold the same shards.

    Args:
        process_group: one rank of each replica.

    Attributes:
        size: number of replicas.
        rank: the number of this one.
        sent_bytes: that this rank has sent so far, counting a ring all-reduce of n bytes as
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

    def average(self, tensor: Tensor) -> None:
        """Replaces a tensor by its mean, which is taken in float32."""
        mean = tensor.detach().to(torch.float32, copy=True).contiguous()
        self.reduce(mean)
        tensor.detach().copy_(mean / self.size)

    def gather(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The tensors of all replicas, of one dimension; their lengths may differ.

        Args:
            tensor: this replica's.
            lengths: lengths of all tensors, which every replica knows.
        """
        padded = tensor
        if tensor.numel() < max(lengths):
            padded = tensor.new_zeros(max(lengths))
            padded[: tensor.numel()] = tensor
        gathered = self.gather_same(padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def gather_same(self, tensor: Tensor) -> list[Tensor]:
        """Likewise, of equal lengths."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            self._all_gather(parts, tensor)
            self.sent_bytes += (self.size - 1) * tensor.numel() * tensor.element_size()
        return parts

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(tensor, op, group=self._group)

    def _all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        dist.all_gather(parts, tensor, group=self._group)
