"""Fake implementations of the ops ``torch.ops.torchrec_hkv.tt_*``.

Schemas and kernels are in ``csrc/bindings``. Ops identify a group of tables by its handle;
:class:`torchrec_hkv.tensor_train.TTGroup` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C


@torch.library.register_fake("torchrec_hkv::tt_sort")
def _(
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    batch_size: int,
    mean: bool,
    pooled: bool,
) -> Tensor:
    if ids.device.type == "cpu":
        return torch.empty_like(ids)
    # As index_words in csrc/bindings/tensor_train/cuda_ops.cpp.
    n, prefixes = ids.shape[0], _C.tensor_train_dims(group)[2]
    scaled = weights is not None or (mean and pooled)
    return ids.new_empty(2 * torch.sym_min(n, prefixes) + (4 if scaled else 3) * n + 400)


def _output(group: int, ids: Tensor, batch_size: int, pooled: bool) -> Tensor:
    total_dim, common_dim, _ = _C.tensor_train_dims(group)
    shape = (batch_size, total_dim) if pooled else (ids.shape[0], common_dim)
    return ids.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("torchrec_hkv::tt_lookup")
def _(
    cores: Sequence[Tensor],
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    index: Tensor | None,
    batch_size: int,
    mean: bool,
    pooled: bool,
) -> Tensor:
    return _output(group, ids, batch_size, pooled)


@torch.library.register_fake("torchrec_hkv::tt_lookup_fused")
def _(
    anchor: Tensor,
    cores: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    index: Tensor | None,
    batch_size: int,
    mean: bool,
    pooled: bool,
    learning_rate: Tensor,
) -> Tensor:
    return _output(group, ids, batch_size, pooled)


@torch.library.register_fake("torchrec_hkv::tt_gradients")
def _(
    cores: Sequence[Tensor],
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    index: Tensor,
    batch_size: int,
    mean: bool,
    pooled: bool,
) -> list[Tensor]:
    return [torch.empty_like(core) for core in cores]


@torch.library.register_fake("torchrec_hkv::tt_update")
def _(
    cores: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    index: Tensor,
    batch_size: int,
    mean: bool,
    pooled: bool,
    learning_rate: Tensor,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::tt_flat_gradients")
def _(
    cores: Sequence[Tensor],
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    index: Tensor,
    batch_size: int,
    mean: bool,
    pooled: bool,
) -> Tensor:
    elements, slices = _C.tensor_train_flat_size(group)
    return grad.new_empty(elements + slices)


@torch.library.register_fake("torchrec_hkv::tt_apply_gradients")
def _(
    cores: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    group: int,
    gradients: Tensor,
    learning_rate: Tensor,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::tt_weights_gradient")
def _(
    cores: Sequence[Tensor],
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    index: Tensor,
    batch_size: int,
    mean: bool,
) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)
