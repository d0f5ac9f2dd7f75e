"""The parameters that stand for tables whose rows are trained in the backward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_hkv.backends.protocol import OptimizerSpec

#: Modules whose functions read ``.grad`` of parameters in order to clip it.
_CLIPPERS = ("torch.nn.utils.clip_grad", "torchrec.optim.clipping")


class ClipNotice:
    """Warns once that a clip of gradients does not reach the rows of some tables.

    Args:
        tables: their names.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables = list(dict.fromkeys(tables))
        self._is_given = False

    def clipped(self) -> None:
        """Called where a clip reads a gradient of these tables."""
        if self._is_given:
            return
        self._is_given = True
        names = ", ".join(map(repr, self._tables))
        warnings.warn(
            "Clipping .grad does not change how the rows of these tables are trained: "
            f"{names}. Their backward applies the optimizer at once and leaves no .grad. Pass "
            "gradient_clipping=True with max_gradient, clip_norm or clip_value to their optimizer "
            "instead, in apply_optimizer_in_backward or in the sharder's fused_params.",
            stacklevel=_level_of_user(),
        )


def _level_of_user() -> int:
    """The stack level, for the caller of this function, of the code that called the clip."""
    level, frame = 1, sys._getframe(1)
    inside = ("torch.", "torchrec.", "torchrec_hkv.")
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


class TablePlaceholder(nn.Parameter):
    """A parameter without rows, whose ``.grad`` stays None.

    ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` pass over parameters without a
    gradient, so that a clip of a model's parameters would leave out the rows in silence. PyTorch
    has no hook for a clip. What a clip does to every parameter is to read ``.grad``, so this class
    looks at who reads it. Optimizers and ``zero_grad`` read it too and cause no warning.
    """

    _notice: ClipNotice | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """As of any parameter."""
        if self._notice is not None and sys._getframe(1).f_globals.get("__name__") in _CLIPPERS:
            self._notice.clipped()
        return super().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)


def placeholder(
    dim: int, dtype: torch.dtype, device: torch.device, notice: ClipNotice | None = None
) -> nn.Parameter:
    """The parameter that stands for a table whose rows come and go: no rows, ``dim`` columns.

    It carries TorchRec's mark of a parameter that is trained in backward, so that
    ``in_backward_optimizer_filter`` keeps it from dense optimizers.

    Args:
        dim: columns of the table.
        dtype: of its rows.
        device: of the table.
        notice: what a clip of the gradient gives; None: nothing.
    """
    parameter = TablePlaceholder(torch.empty(0, dim, dtype=dtype, device=device))
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    parameter._notice = notice
    return parameter


def clip_notice(tables: Sequence[str], optimizer: OptimizerSpec) -> ClipNotice | None:
    """The notice for tables that share an optimizer; None where that clips gradients itself."""
    bounds = (optimizer.clip_output, optimizer.clip_value, optimizer.clip_norm)
    return ClipNotice(tables) if all(bound is None for bound in bounds) else None
