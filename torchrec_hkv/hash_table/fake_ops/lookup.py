"""Fakes of the operators of a training step: find, insert, pool and update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C


@torch.library.register_fake("torchrec_hkv::find")
def _(
    group: int,
    ids: Tensor,
    offsets: Tensor | None,
    batch_size: int,
    bags: Sequence[int] | None = None,
) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::find_or_insert")
def _(
    counters: Tensor,
    group: int,
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    pin: int | None,
    bags: Sequence[int] | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(ids)


def _output_shape(group: int, batch_size: int, bags: Sequence[int] | None) -> tuple[int, ...]:
    if bags is None:
        return (batch_size, _C.group_total_dim(group))
    dims = _C.group_feature_dims(group)
    return (sum(number * dim for number, dim in zip(bags, dims, strict=True)),)


@torch.library.register_fake("torchrec_hkv::pooled_lookup")
def _(
    anchor: Tensor,
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    batch_size: int,
    mean: bool,
    pin: int | None,
    learning_rate: Tensor,
    bags: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    shape = _output_shape(group, batch_size, bags)
    return ids.new_empty(shape, dtype=dtype or torch.float32)


@torch.library.register_fake("torchrec_hkv::train_lookup")
def _(
    counters: Tensor,
    anchor: Tensor,
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    batch_size: int,
    mean: bool,
    learning_rate: Tensor,
    bags: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    shape = _output_shape(group, batch_size, bags)
    return ids.new_empty(shape, dtype=dtype or torch.float32)


@torch.library.register_fake("torchrec_hkv::pooled_lookup_grouped")
def _(
    anchor: Tensor,
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    batch_size: int,
    mean: bool,
    learning_rate: Tensor,
    bags: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _output_shape(group, batch_size, bags)
    size = torch.library.get_ctx().new_dynamic_size()  # it depends on earlier batches
    grouped = ids.new_empty((size,), dtype=torch.uint8)
    ways = torch.empty(1, dtype=torch.int64)
    return ids.new_empty(shape, dtype=dtype or torch.float32), grouped, ways


@torch.library.register_fake("torchrec_hkv::weights_gradient")
def _(
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    slots: Tensor,
    batch_size: int,
    mean: bool,
    bags: Sequence[int] | None = None,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.float32)


@torch.library.register_fake("torchrec_hkv::update_rows")
def _(
    counters: Tensor,
    group: int,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    batch_size: int,
    mean: bool,
    learning_rate: Tensor,
    rounds: int = 1,
    bags: Sequence[int] | None = None,
    grouped: Tensor | None = None,
    ways: Tensor | None = None,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::initial_rows")
def _(
    ids: Tensor,
    dim: int,
    column_offset: int,
    seed: int,
    distribution: str,
    low: float,
    high: float,
    mean: float,
    std: float,
) -> Tensor:
    return ids.new_empty((ids.shape[0], dim), dtype=torch.float32)


@torch.library.register_fake("torchrec_hkv::expire")
def _(counters: Tensor, group: int) -> None:
    return None
