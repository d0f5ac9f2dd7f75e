"""The parameters that represent tables whose rows are updated in the backward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_hkv.backends.protocol import OptimizerSpec

#: Modules whose functions read ``.grad`` of parameters to clip it.
_CLIPPERS = ("torch.nn.utils.clip_grad", "torchrec.optim.clipping")


class ClipNotice:
    """Warns once that gradient clipping does not affect the rows of some tables.

    Args:
        tables: names of the tables.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables = list(dict.fromkeys(tables))
        self._has_warned = False

    def clipped(self) -> None:
        """Called when a clipping function reads the gradient of these tables."""
        if self._has_warned:
            return
        self._has_warned = True
        names = ", ".join(map(repr, self._tables))
        warnings.warn(
            "Clipping .grad does not change how the rows of these tables are trained: "
            f"{names}. Their backward applies the optimizer at once and leaves no .grad. Pass "
            "gradient_clipping=True with max_gradient, clip_norm or clip_value to their optimizer "
            "instead, in apply_optimizer_in_backward or in the sharder's fused_params.",
            stacklevel=_level_of_user(),
        )


def _level_of_user() -> int:
    """The stack level, relative to the caller, of the code that called the clipping function."""
    level, frame = 1, sys._getframe(1)
    inside = ("torch.", "torchrec.", "torchrec_hkv.")
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


class TablePlaceholder(nn.Parameter):
    """A parameter without rows whose ``.grad`` stays None.

    ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` skip parameters without a gradient,
    so clipping a model's gradients would silently skip the rows. PyTorch has no hook for clipping.
    Every clipping function reads ``.grad``, so this class checks who reads it. Optimizers and
    ``zero_grad`` read it too and cause no warning.
    """

    _notice: ClipNotice | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, see ``torch.Tensor.grad``."""
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
    """Creates the parameter that represents a table: no rows, ``dim`` columns.

    It is marked as a parameter that is updated in backward, so that
    ``in_backward_optimizer_filter`` excludes it from dense optimizers.

    Args:
        dim: number of columns of the table.
        dtype: data type of the rows. The parameter of integers is float32, since only floats have
            gradients.
        device: device of the table.
        notice: warns when its gradient is clipped; None for no warning.
    """
    if not dtype.is_floating_point:
        dtype = torch.float32
    parameter = TablePlaceholder(torch.empty(0, dim, dtype=dtype, device=device))
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    parameter._notice = notice
    return parameter


def clip_notice(tables: Sequence[str], optimizer: OptimizerSpec) -> ClipNotice | None:
    """The notice for tables with one optimizer; None if the optimizer clips gradients itself."""
    bounds = (optimizer.clip_output, optimizer.clip_value, optimizer.clip_norm)
    return ClipNotice(tables) if all(bound is None for bound in bounds) else None
