"""Fakes of the dispatcher ops ``torch.ops.torchrec_hkv.serving_*``; schemas and kernels are in
``csrc/bindings/serving/``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C  # noqa: F401  registers the ops

#: Values of ``kinds`` of ``serving_pool``: how a bag's mean is computed (``Mean`` in
#: ``csrc/serving/table.h``).
SUM, SCALED_ROWS, SCALED_SUM, DIVIDED_SUM = range(4)
#: Flag added to a kind: a product and its sum are rounded once (fused multiply-add).
FUSED = 256


@torch.library.register_fake("torchrec_hkv::serving_pool")
def _(
    handle: Tensor,
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    tables: Sequence[int],
    kinds: Sequence[int],
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    return ids.new_empty((lengths.shape[1], columns), dtype=dtype)


@torch.library.register_fake("torchrec_hkv::serving_rows")
def _(
    handle: Tensor,
    ids: Tensor,
    lengths: Tensor,
    features: Sequence[int],
    tables: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    context = torch.library.get_ctx()
    return [ids.new_empty((context.new_dynamic_size(), dim), dtype=dtype) for dim in dims]


@torch.library.register_fake("torchrec_hkv::serving_tt")
def _(
    handle: Tensor,
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    features: Sequence[int],
    group: int,
    dims: Sequence[int],
    mean: bool,
    pooled: bool,
) -> list[Tensor]:
    if pooled:
        return [ids.new_empty((lengths.shape[1], sum(dims)), dtype=torch.float32)]
    context = torch.library.get_ctx()
    return [ids.new_empty((context.new_dynamic_size(), dim), dtype=torch.float32) for dim in dims]


@torch.library.register_fake("torchrec_hkv::serving_place")
def _(
    ids: Tensor,
    erased: Tensor | None,
    blocks: int,
    block_buckets: int,
    first_block: int,
    num_blocks: int,
    first_row: int,
) -> tuple[Tensor, Tensor]:
    return ids.new_empty((num_blocks, block_buckets, 8)), torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::serving_blocks")
def _(ids: Tensor, blocks: int) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::serving_memory")
def _(bytes: int) -> Tensor:
    return torch.empty(bytes, dtype=torch.uint8)


@torch.library.register_fake("torchrec_hkv::serving_pinned")
def _(data: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(data)


@torch.library.register_fake("torchrec_hkv::serving_expect_random")
def _(data: Tensor, huge: bool) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::serving_lower")
def _(data: Tensor, doublings: int) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::serving_gather")
def _(data: Tensor, order: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::serving_choose_hot")
def _(counts: Tensor, before: Tensor | None, wanted: int) -> Tensor:
    return counts.new_empty(-(-counts.shape[0] // 32), 2)


@torch.library.register_fake("torchrec_hkv::serving_row_numbers")
def _(index: Tensor, ids: Tensor) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::serving_copy_hot")
def _(words: Tensor, rows: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::serving_split")
def _(ids: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(parts)
