"""Keeps float32 tensors of a module in float32 when the module is converted to another dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps a function for ``nn.Module._apply`` so that it does not change the dtype of float32
    tensors, only their device."""

    def apply(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if tensor.dtype == torch.float32 and result.dtype != torch.float32:
            return tensor.to(result.device)
        return result

    return apply
