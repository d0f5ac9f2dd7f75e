"""What a module holds in float32 stays so when the module is made another dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for ``nn.Module._apply`` that does as ``fn``, but changes no float32 to another
    dtype: such a tensor only goes to the device that ``fn`` gives it."""

    def apply(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if tensor.dtype == torch.float32 and result.dtype != torch.float32:
            return tensor.to(result.device)
        return result

    return apply
