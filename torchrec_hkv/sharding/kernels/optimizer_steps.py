"""The number of updates that stock kernels count, which corrects the bias of Adam's means."""

from __future__ import annotations

from torch import nn

_COUNTERS = ("iter", "iter_cpu")


def optimizer_steps(module: nn.Module) -> int:
    """The largest number of updates of a stock kernel in a module; 0 without stock kernels."""
    found = [int(kernel.iter) for kernel in module.modules() if hasattr(kernel, "iter")]
    return max(found, default=0)


def set_optimizer_steps(module: nn.Module, steps: int) -> None:
    """Sets the number of updates of all stock kernels in a module."""
    for kernel in module.modules():
        for name in _COUNTERS:
            if hasattr(kernel, name):
                getattr(kernel, name).fill_(steps)
