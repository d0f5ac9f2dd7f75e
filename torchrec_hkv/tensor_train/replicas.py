"""Replicas of tables on several ranks, whose gradients are averaged before every update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.once_differentiable import once_differentiable
from torchrec_hkv.tensor_train.fused_rows import WEIGHTS_MESSAGE
from torchrec_hkv.tensor_train.group import TTGroup

_ops = torch.ops.torchrec_hkv


class Replicas:
    """The ranks that hold replicas of tables. All ranks must make the same calls in the same order.

    Args:
        process_group: the ranks; None for all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = dist.group.WORLD if process_group is None else process_group
        self.size = dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks."""
        return dist.get_rank(self._group) == 0

    def average(self, tensor: Tensor) -> None:
        """Replaces a tensor by its mean over the ranks."""
        dist.all_reduce(tensor, group=self._group)
        tensor /= self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks as a new tensor."""
        total = tensor.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def copy_first(self, tensor: Tensor) -> None:
        """Replaces a tensor by the first rank's tensor."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenates 1-D tensors of all ranks, whose lengths may differ. Synchronizes with the
        device."""
        length = torch.tensor([tensor.numel()], device=tensor.device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        counts = [int(one) for one in lengths]
        padded = tensor.new_zeros(max(counts))
        padded[: tensor.numel()] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def replicated_lookup(
    group: TTGroup,
    anchor: Tensor,
    cores: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    learning_rate: Tensor,
    replicas: Replicas,
    *,
    weights: Tensor | None = None,
    mean: bool = False,
    index: Tensor,
) -> Tensor:
    """Looks up rows like :meth:`TTGroup.lookup_fused`, with gradients averaged over ranks.

    Args:
        group: a group with an optimizer.
        anchor: see :meth:`TTGroup.lookup_fused`.
        cores: cores of all tables, equal on all ranks; they stay equal.
        states: optimizer states, equal on all ranks.
        step: number of updates, equal on all ranks.
        ids: ids of this rank.
        offsets: offsets of this rank.
        batch_size: batch size of this rank; ranks may differ.
        learning_rate: float32 ``[]``, equal on all ranks.
        replicas: the ranks. Slices that occur on any rank are updated on all.
        weights: see :class:`Pooling`.
        mean: see :class:`Pooling`.
        index: result of :meth:`TTGroup.sort`.
    """
    batch = (ids, offsets, batch_size, mean, index)
    return _Replicated.apply(
        anchor, weights, group, list(cores), list(states), step, batch, learning_rate, replicas
    )


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor, weights, group, cores, states, step, batch, learning_rate, replicas
    ):
        ids, offsets, batch_size, mean, index = batch
        ctx.save_for_backward(weights, ids, offsets, index)
        ctx.rest = (group, cores, states, step, batch_size, mean, learning_rate, replicas)
        return group.lookup(
            cores, ids, offsets, batch_size, weights=weights, mean=mean, index=index
        )

    @staticmethod
    @once_differentiable(WEIGHTS_MESSAGE)
    def backward(ctx: Any, grad):
        group, cores, states, step, batch_size, mean, learning_rate, replicas = ctx.rest
        weights, ids, offsets, index = ctx.saved_tensors
        grad = grad.contiguous()
        if (bound := group.optimizer.clip_output) is not None:
            # The gradient of a table on a single rank is already divided by the number of ranks.
            bound *= replicas.size
            grad = grad.clamp(-bound, bound)
        weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = _ops.tt_weights_gradient(
                cores, group.handle, grad, ids, offsets, index, batch_size, mean
            )
        gradients = group.flat_gradients(
            cores, grad, ids, offsets, batch_size, weights=weights, mean=mean, index=index
        )
        replicas.average(gradients)
        group.apply_gradients(cores, states, step, gradients, learning_rate)
        return None, weights_grad, None, None, None, None, None, None, None
