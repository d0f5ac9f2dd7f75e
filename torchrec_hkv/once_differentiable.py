"""Backwards whose gradients can't be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def once_differentiable(message: str, *, linear: bool = False) -> Callable[[Backward], Backward]:
    """Decorates the backward of an ``autograd.Function`` whose gradients can't be differentiated.

    Without ``create_graph=True`` it changes nothing. With it, a backward that reaches one of these
    gradients raises, while it would treat plain tensors as constants.
    ``torch.autograd.function.once_differentiable`` only raises if the incoming gradient itself
    requires grad.

    Args:
        message: message of the RuntimeError.
        linear: whether the forward is linear in its inputs, so that its gradients depend only on
            the incoming gradient. If the incoming gradient is a constant, nothing raises.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            if linear and not any(grad is not None and grad.requires_grad for grad in grads):
                return gradients
            return tuple(
                _Refused.apply(each.detach().requires_grad_(), message)
                if isinstance(each, Tensor)
                else each
                for each in gradients
            )

        return wrapper

    return decorate


class _Refused(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str) -> Tensor:
        ctx.message = message
        return gradient.clone()  # not a view: TorchRec scales gradients of weights in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise RuntimeError(ctx.message)
