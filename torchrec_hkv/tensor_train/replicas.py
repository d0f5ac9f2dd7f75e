"""Tables that several ranks hold alike: their gradients are averaged before every update."""

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
    """The ranks that hold tables alike. Every rank calls every method as often as the others, and
    in the same order.

    Args:
        process_group: of the ranks; None: all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = dist.group.WORLD if process_group is None else process_group
        self.size = dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of them."""
        return dist.get_rank(self._group) == 0

    def average(self, tensor: Tensor) -> None:
        """Replaces a tensor by its mean over the ranks."""
        dist.all_reduce(tensor, group=self._group)
        tensor /= self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, a new tensor."""
        total = tensor.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def copy_first(self, tensor: Tensor) -> None:
        """Replaces a tensor by the first rank's."""
        dist.broadcast(tensor, group=self._group, group_src=0)

    def gather(self, tensor: Tensor) -> Tensor:
        """The 1-D tensors of all ranks, one after the other; their lengths may differ (waits for
        the device)."""
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
    """As :meth:`TTGroup.lookup_fused`, where ranks agree on the gradient before the update.

    Args:
        group: with an optimizer.
        anchor: as there.
        cores: equal on all ranks; they stay so.
        states: likewise.
        step: likewise.
        ids: of this rank.
        offsets: likewise.
        batch_size: likewise; ranks may differ.
        learning_rate: equal on all ranks.
        replicas: the ranks, over which gradients are averaged. Slices that took part anywhere
            are updated everywhere.
        weights: as there.
        mean: likewise.
        index: likewise.
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
            # A table on one rank gets gradients that are divided by the number of ranks already.
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
