"""Lookups of cached hot rows, whose backward returns gradients or updates the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from torchrec_hkv.hash_table.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    RowWiseAdagrad,
)
from torchrec_hkv.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from torchrec_hkv.tensor_train.replicas import Replicas

#: Error message for a second derivative of weights.
WEIGHTS_MESSAGE = (
    "The gradient of the weights of a Tensor-Train lookup can't be differentiated, since a fused "
    "optimizer trains the cores: give the table no fused optimizer (sparse=False)."
)
#: Optimizers that the fused update of hot rows supports.
HOT_ROW_OPTIMIZERS = (SGD, Adagrad, RowWiseAdagrad, Adam)


class RowStore(Protocol):
    """The attributes of a cache that lookups use."""

    rows: Tensor
    states: Tensor
    step: Tensor
    optimizer: Optimizer | None
    generation: int
    replicas: Replicas | None


def check_hot_row_optimizer(optimizer: Optimizer | None) -> None:
    """Checks that :func:`update_rows` supports an optimizer.

    Raises:
        ValueError: the optimizer is another, or has momentum, weight decay, clipping or step counts
            by row.
    """
    if optimizer is None:
        return
    plain = type(optimizer) in HOT_ROW_OPTIMIZERS
    for name, none in (("momentum", 0.0), ("weight_decay", 0.0), ("step_mode", "global")):
        plain = plain and getattr(optimizer, name, none) == none
    for name in ("clip_value", "clip_norm", "clip_output", "max_norm"):
        plain = plain and getattr(optimizer, name, None) is None
    if not plain:
        raise ValueError(
            f"optimizer is {optimizer}, but hot rows are trained by SGD, Adagrad, RowWiseAdagrad "
            "or Adam without momentum, weight decay, clipping and step counts by row."
        )


def plain_row_lookup(store: RowStore, places: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums by bag. ``store.rows`` gets a gradient, which can be differentiated again."""
    out = _RowLookup.apply(store.rows, weights, places, offsets)
    generation = store.generation
    if out.requires_grad:
        out.register_hook(lambda grad: _check_generation(store, generation))
    return out


def fused_row_lookup(
    store: RowStore, places: Tensor, offsets: Tensor, weights: Tensor, learning_rate: Tensor
) -> Tensor:
    """Weighted sums by bag. The backward updates the rows."""
    anchor = torch.empty(0, device=store.rows.device, requires_grad=True)
    return _FusedRowLookup.apply(anchor, weights, store, places, offsets, learning_rate)


def _check_generation(store: RowStore, generation: int) -> None:
    if store.generation != generation:
        raise RuntimeError(
            "cache_populate() was called between a forward and its backward: call it before the "
            "forward or after the backward."
        )


def _pooled(rows: Tensor, weights: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """Weighted sums of rows by bag."""
    return functional.embedding_bag(
        places, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _by_position(grad: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of each id, which is the gradient of its bag."""
    bags = torch.repeat_interleave(
        torch.arange(offsets.numel() - 1, device=grad.device),
        offsets.diff(),
        output_size=places.numel(),
    )
    return grad[bags]


class _RowLookup(torch.autograd.Function):
    """``embedding_bag`` with gradients that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, rows, weights, places, offsets):
        ctx.save_for_backward(rows, weights, places, offsets)
        return _pooled(rows, weights, places, offsets)

    @staticmethod
    def backward(ctx: Any, grad):
        # Uses only operations that autograd can record.
        rows, weights, places, offsets = ctx.saved_tensors
        by_position = _by_position(grad, places, offsets)
        rows_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = torch.zeros_like(rows).index_add(0, places, by_position * weights[:, None])
        if ctx.needs_input_grad[1]:
            weights_grad = (by_position * rows[places]).sum(dim=1)
        return rows_grad, weights_grad, None, None


class _FusedRowLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor, weights, store, places, offsets, learning_rate):
        ctx.save_for_backward(weights, places, offsets)
        ctx.store, ctx.generation, ctx.learning_rate = store, store.generation, learning_rate
        return _pooled(store.rows.detach(), weights, places, offsets)

    @staticmethod
    @once_differentiable(WEIGHTS_MESSAGE)
    def backward(ctx: Any, grad):
        store = ctx.store
        _check_generation(store, ctx.generation)
        weights, places, offsets = ctx.saved_tensors
        by_position = _by_position(grad, places, offsets)
        weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = (by_position * store.rows.detach()[places]).sum(dim=1)
        gradient = torch.zeros_like(store.rows).index_add_(
            0, places, by_position * weights[:, None]
        )
        touched = torch.zeros_like(store.rows[:, :1], dtype=torch.bool)
        touched[places] = True
        if store.replicas is not None:
            both = torch.cat([gradient.flatten(), touched.flatten().float()])
            store.replicas.average(both)
            gradient = both[: gradient.numel()].view_as(gradient)
            touched = both[gradient.numel() :, None] > 0
        update_rows(store, gradient, touched, ctx.learning_rate)
        return None, weights_grad, None, None, None, None


@torch.no_grad()
def update_rows(store: RowStore, gradient: Tensor, touched: Tensor, learning_rate: Tensor) -> None:
    """Applies the optimizer to the touched rows, by the formulas of csrc/common/optimizers.h.

    Args:
        store: rows ``[n, dim]``, with their states and step.
        gradient: float32 ``[n, dim]``.
        touched: bool ``[n, 1]``.
        learning_rate: float32 ``[]``.
    """
    store.step += 1
    optimizer, dim = store.optimizer, store.rows.shape[1]
    match optimizer:
        case RowWiseAdagrad():
            sums = store.states[:, :1]
            sums += gradient.square().mean(dim=1, keepdim=True)
            root = (sums + optimizer.initial_accumulator).sqrt()
            direction = gradient / (root + optimizer.eps)
        case Adagrad():
            sums = store.states[:, :dim]
            sums += gradient.square()
            root = (sums + optimizer.initial_accumulator).sqrt()
            direction = gradient / (root + optimizer.eps)
        case Adam():
            first, second = store.states[:, :dim], store.states[:, dim : 2 * dim]
            beta1, beta2 = optimizer.betas
            first.copy_(torch.where(touched, beta1 * first + (1 - beta1) * gradient, first))
            second.copy_(
                torch.where(touched, beta2 * second + (1 - beta2) * gradient.square(), second)
            )
            step = store.step.double()
            mean = first / (1 - beta1**step).float()
            root = (second / (1 - beta2**step).float()).sqrt()
            direction = mean / (root + optimizer.eps)
        case _:
            direction = gradient
    # Untouched rows need the where: a zero gradient over an eps of 0 would be NaN.
    store.rows.data -= torch.where(touched, learning_rate * direction, 0.0)
