"""Gradient accumulation: gradients of several backwards, applied in one update.

The gradient of the pooled output is stored with the ids and slots of its batch. Rows are not summed
before the update. The update treats the stored batches as one batch in which each feature occurs
once for each stored batch, and sums the gradients of each row as within a batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.once_differentiable import once_differentiable

_ops = torch.ops.torchrec_hkv


@dataclasses.dataclass(frozen=True)
class PendingGradient:
    """A stored backward: the arguments of ``update_rows``, and the pin of its slots."""

    grad: Tensor
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    slots: Tensor
    growths: int  # number of growths of the group when the slots were found
    batch_size: int
    mean: bool
    pin: Any  # keeps the rows in their slots
    bags: tuple[int, ...] | None = None  # number of bags of each feature, if they differ


class Accumulator:
    """The stored gradients of a group's lookups.

    Args:
        group: the group of the tables.
        optimizer: the optimizer of the tables; None if they are not trained.
    """

    def __init__(self, group: _C.TableGroup, optimizer: Optimizer | None) -> None:
        self.group = group
        self.optimizer = optimizer
        self._rounds: list[PendingGradient] = []
        self._holds = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A context in which the backwards of lookups store their gradients."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    @property
    def is_needed(self) -> bool:
        """Whether the next lookup stores its gradient, or has stored gradients to apply."""
        return self._holds or bool(self._rounds)

    def lookup(self, anchor: Tensor, weights: Tensor | None, *args: Any) -> Tensor:
        """A training lookup, see ``TableGroup.pooled_lookup``.

        Args:
            anchor: a tensor that requires grad.
            weights: float32 ``[n]`` or None.
            args: ids, offsets, slots, batch_size, mean, pin, learning_rate, bags, dtype.
        """
        return _AccumulatingLookup.apply(anchor, weights, self, self._holds, *args)

    def add(self, backward: PendingGradient) -> None:
        """Stores a backward."""
        self._rounds.append(backward)

    def apply(self, learning_rate: Tensor) -> None:
        """Updates the rows by all stored gradients, and drops these and their pins."""
        rounds, self._rounds = self._rounds, []
        group = self.group
        if self.optimizer is not None:
            rounds = [self._with_current_slots(pending) for pending in rounds]
            dims = _C.group_feature_dims(group.handle)
            *batch, bags = as_one_batch(rounds, dims)
            _ops.update_rows(group.counters, group.handle, *batch, learning_rate, len(rounds), bags)

    def _with_current_slots(self, pending: PendingGradient) -> PendingGradient:
        args = (
            pending.slots,
            pending.growths,
            pending.ids,
            pending.offsets,
            pending.batch_size,
            pending.bags,
        )
        return dataclasses.replace(pending, slots=current_slots(self.group, *args)[0])


def current_slots(
    group: Any,
    slots: Tensor,
    growths: int,
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    bags: Sequence[int] | None = None,
) -> tuple[Tensor, int]:
    """Finds slots again if a table has grown since they were found.

    Pinned ids are still in the table. Ids that had no slot keep none.

    Args:
        group: a TableGroup, of Python or of the extension.
        slots: the slots found before.
        growths: number of growths of the group at that time.
        ids: the ids of the slots.
        offsets: as for ``TableGroup.find``.
        batch_size: as for ``TableGroup.find``.
        bags: as for ``TableGroup.find``.

    Returns:
        The current slots, and the current number of growths.
    """
    now = group.growths
    if now == growths:
        return slots, growths
    found = _ops.find(group.handle, ids, offsets, batch_size, bags)
    return torch.where(slots < 0, slots, found), now


class _AccumulatingLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        accumulator: Accumulator,
        holds: bool,
        ids: Tensor,
        offsets: Tensor,
        slots: Tensor,
        batch_size: int,
        mean: bool,
        pin: _C.Pin,
        learning_rate: Tensor,
        bags: tuple[int, ...] | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        group = accumulator.group
        ctx.accumulator, ctx.holds, ctx.learning_rate = accumulator, holds, learning_rate
        where = (slots, pin.growths, ids, offsets, batch_size, bags)
        slots, ctx.growths = current_slots(group, *where)
        ctx.save_for_backward(ids, offsets, slots, weights)
        ctx.batch_size, ctx.mean, ctx.bags = batch_size, mean, bags
        ctx.pin = pin
        # No pin is passed: this lookup must neither release it nor record a backward.
        args = (ids, offsets, weights, slots, batch_size, mean, None, learning_rate, bags, dtype)
        return _ops.pooled_lookup(anchor, group.handle, *args)

    @staticmethod
    @once_differentiable(
        "The gradient of the weights of a hash table's lookup can't be differentiated, since the "
        "table's rows have no gradients."
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, offsets, slots, weights = ctx.saved_tensors
        accumulator: Accumulator = ctx.accumulator
        where = (slots, ctx.growths, ids, offsets, ctx.batch_size, ctx.bags)
        slots, growths = current_slots(accumulator.group, *where)
        optimizer = accumulator.optimizer
        # A copy, because autograd may reuse the memory of the gradient.
        bound = None if optimizer is None else optimizer.clip_output
        grad = grad.clone(memory_format=torch.contiguous_format)
        if bound is not None:
            grad = grad.clamp_(-bound, bound)
        weights_grad = None
        if ctx.needs_input_grad[1]:
            args = (grad, ids, offsets, slots, ctx.batch_size, ctx.mean, ctx.bags)
            weights_grad = _ops.weights_gradient(accumulator.group.handle, *args)
        if weights is not None:
            weights = weights.detach()
        batch = (grad, ids, offsets, weights, slots, growths, ctx.batch_size, ctx.mean)
        accumulator.add(PendingGradient(*batch, ctx.pin, ctx.bags))
        ctx.pin = None
        if not ctx.holds:
            accumulator.apply(ctx.learning_rate)
        return (None, weights_grad, *[None] * 11)


def as_one_batch(rounds: list[PendingGradient], dims: Sequence[int]) -> tuple[Any, ...]:
    """Concatenates backwards into one batch, without synchronization.

    Args:
        rounds: at least one backward.
        dims: number of columns of each feature of the group.

    Returns:
        grad, ids, offsets, weights, slots, batch_size, mean, bags: arguments of ``update_rows``.
    """
    if len(rounds) == 1:
        (pending,) = rounds
        batch = (pending.grad, pending.ids, pending.offsets, pending.weights, pending.slots)
        return (*batch, pending.batch_size, pending.mean, pending.bags)
    batch_size, bags = max(pending.batch_size for pending in rounds), None
    dtype = functools.reduce(torch.promote_types, (pending.grad.dtype for pending in rounds))
    if any(pending.bags is not None for pending in rounds):
        bags = tuple(number for pending in rounds for number in _bags(pending, len(dims)))
        grad = torch.cat([_flat(pending, dims).to(dtype) for pending in rounds])
        starts = [pending.offsets[:-1] for pending in rounds]
    else:
        grad = torch.cat([_padded(pending.grad, batch_size).to(dtype) for pending in rounds], dim=1)
        starts = [_starts(pending, batch_size, len(dims)) for pending in rounds]
    first = 0
    for index, pending in enumerate(rounds):
        starts[index] = starts[index] + first
        first += pending.ids.numel()
    end = torch.full_like(rounds[0].offsets[:1], first)
    weights = None
    if any(pending.weights is not None for pending in rounds):
        weights = torch.cat(
            [
                torch.ones_like(pending.ids, dtype=torch.float32)
                if pending.weights is None
                else pending.weights
                for pending in rounds
            ]
        )
    return (
        grad,
        torch.cat([pending.ids for pending in rounds]),
        torch.cat([*starts, end]),
        weights,
        torch.cat([pending.slots for pending in rounds]),
        batch_size,
        rounds[0].mean,
        bags,
    )


def _bags(pending: PendingGradient, features: int) -> tuple[int, ...]:
    """Number of bags of each feature."""
    return (pending.batch_size,) * features if pending.bags is None else pending.bags


def _flat(pending: PendingGradient, dims: Sequence[int]) -> Tensor:
    """The gradient, one feature after the other."""
    if pending.bags is not None:
        return pending.grad
    return torch.cat([part.flatten() for part in pending.grad.split(list(dims), dim=1)])


def _starts(pending: PendingGradient, batch_size: int, features: int) -> Tensor:
    """Offsets of the bags of a batch, with empty bags up to ``batch_size`` for each feature."""
    size = pending.batch_size
    if size == batch_size:
        return pending.offsets[:-1]
    starts = pending.offsets[:-1].view(features, size)
    ends = pending.offsets[size::size] if size else pending.offsets.expand(features)
    return torch.cat(
        [starts, ends.unsqueeze(1).expand(features, batch_size - size)], dim=1
    ).flatten()


def _padded(grad: Tensor, batch_size: int) -> Tensor:
    return torch.nn.functional.pad(grad, (0, 0, 0, batch_size - grad.shape[0]))
