"""What PyTorch sees of gradients that are held: the gradient of a parameter with one value.

Optimizers, ``GradScaler``, ``clip_grad_norm_`` and ``zero_grad`` know gradients as ``.grad`` of
parameters. So a module of tables has one parameter, the anchor, whose gradient is a constant for
each backward, :data:`MARK`: what is done to it is done to the held gradients. It is so small that
it adds nothing to a norm (its square is 0 in float32), and a power of two, so that factors can be
read from it exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MARK = 2.0**-80


class Marker:
    """The anchor of a module, and what has been done to its gradient.

    Attributes:
        checks: whether backwards look for values that are not finite, as a ``GradScaler`` needs it.
    """

    def __init__(self, anchor: nn.Parameter) -> None:
        self.checks = False
        self._backwards = 0  # that the gradient is the sum of
        self._pending: dict[int, int] = {}  # by graph task, whose gradients autograd has yet to add
        self._version = 0  # of the gradient, when autograd last wrote it
        self.bind(anchor)

    def bind(self, anchor: nn.Parameter) -> None:
        """Takes another anchor."""
        self.anchor = anchor
        anchor.register_post_accumulate_grad_hook(self._accumulated)

    def gradient(self, grad: Tensor) -> Tensor:
        """The anchor's gradient of one backward: NaN where it looks and ``grad`` is not finite."""
        task = graph_task()
        self._pending[task] = self._pending.get(task, 0) + 1
        mark = grad.new_full((1,), MARK)
        if self.checks:
            mark.masked_fill_(grad.isfinite().all().logical_not(), float("nan"))
        return mark

    def _accumulated(self, anchor: Tensor) -> None:
        self._backwards += self._pending.pop(graph_task(), 0)
        self._version = anchor.grad._version

    def never_added(self) -> set[int]:
        """Graph tasks that have ended without adding their gradient: those of
        ``torch.autograd.grad``, unless somebody has put what it gave into ``.grad``, and those that
        an error ended. Not to be called in a backward.
        """
        pending, self._pending = self._pending, {}
        if pending and self._backwards == 0 and self.anchor.grad is not None:
            self._backwards = sum(pending.values())
            self._version = self.anchor.grad._version
            return set()
        return set(pending)

    @property
    def was_dropped(self) -> bool:
        """Whether somebody took the gradient away, as ``Module.zero_grad`` does."""
        return self._backwards > 0 and self.anchor.grad is None

    @property
    def was_written(self) -> bool:
        """Whether somebody wrote to the gradient; ``GradScaler.unscale_`` does it unseen."""
        grad = self.anchor.grad
        return self._backwards > 0 and grad is not None and grad._version != self._version

    def factor(self) -> Tensor | None:
        """What the gradient was multiplied by since autograd wrote it, float32 ``[1]``, often 1.

        None where there is no gradient.
        """
        if self._backwards == 0 or self.anchor.grad is None:
            return None
        return self.anchor.grad.detach() / (self._backwards * MARK)

    def clear(self) -> None:
        """Takes the gradient away."""
        self.anchor.grad = None
        self._backwards = 0


def graph_task() -> int:
    """The backward that runs; one within another has a number of its own."""
    return torch._C._current_graph_task_id()
