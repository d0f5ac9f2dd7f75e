"""The parameter through which PyTorch sees the stored gradients of a module of hash tables.

Optimizers, ``GradScaler``, ``clip_grad_norm_`` and ``zero_grad`` access gradients as ``.grad`` of
parameters. A module of tables therefore has one parameter, the anchor. Each backward adds the
constant :data:`MARK` to the anchor's gradient. If this gradient is scaled, the stored gradients are
scaled by the same factor. The constant is so small that it adds nothing to a norm (its square is 0
in float32). It is a power of two, so that scale factors can be recovered exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MARK = 2.0**-80


class Marker:
    """The anchor of a module, and a record of the operations on its gradient.

    Attributes:
        checks: whether backwards check for values that are not finite, for a ``GradScaler``.
    """

    def __init__(self, anchor: nn.Parameter) -> None:
        self.checks = False
        self._backwards = 0  # number of backwards whose gradients are summed
        self._pending: dict[int, int] = {}  # number of gradients not accumulated yet, by graph task
        self._version = 0  # version of the gradient when autograd last wrote it
        self.bind(anchor)

    def bind(self, anchor: nn.Parameter) -> None:
        """Replaces the anchor."""
        self.anchor = anchor
        anchor.register_post_accumulate_grad_hook(self._accumulated)

    def gradient(self, grad: Tensor) -> Tensor:
        """The anchor's gradient of one backward; NaN if ``checks`` and ``grad`` is not finite."""
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
        """The graph tasks that ended without accumulating their gradient, because of an error or
        because ``torch.autograd.grad`` ran them. If the caller has assigned the result of
        ``torch.autograd.grad`` to ``.grad``, they count as accumulated. Must not be called in a
        backward.
        """
        pending, self._pending = self._pending, {}
        if pending and self._backwards == 0 and self.anchor.grad is not None:
            self._backwards = sum(pending.values())
            self._version = self.anchor.grad._version
            return set()
        return set(pending)

    @property
    def was_dropped(self) -> bool:
        """Whether the gradient was removed, as ``Module.zero_grad`` does."""
        return self._backwards > 0 and self.anchor.grad is None

    @property
    def was_written(self) -> bool:
        """Whether the gradient was modified. Does not detect ``GradScaler.unscale_``."""
        grad = self.anchor.grad
        return self._backwards > 0 and grad is not None and grad._version != self._version

    def factor(self) -> Tensor | None:
        """The factor by which the gradient was multiplied since autograd wrote it, float32 ``[1]``.

        None without a gradient.
        """
        if self._backwards == 0 or self.anchor.grad is None:
            return None
        return self.anchor.grad.detach() / (self._backwards * MARK)

    def clear(self) -> None:
        """Removes the gradient."""
        self.anchor.grad = None
        self._backwards = 0


def graph_task() -> int:
    """Id of the running backward. Nested backwards have different ids."""
    return torch._C._current_graph_task_id()
