"""Fakes of the operators that write, read, erase and select entries."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv import _C


@torch.library.register_fake("torchrec_hkv::insert")
def _(
    counters: Tensor,
    group: int,
    ids: Tensor,
    scores: Tensor | None,
    rows: Tensor | None,
    expected_present: Tensor | None,
    initialize: bool,
    assign: bool,
    returns_evicted: bool,
    offsets: Tensor | None = None,
    batch_size: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    room = ids.shape[0] if returns_evicted else 0
    dtype, dim = _C.group_row_dtype(group), _C.group_row_width(group)
    return (
        torch.empty_like(ids),
        torch.empty_like(ids, dtype=torch.bool),
        ids.new_empty((room,)),
        ids.new_empty((room, dim), dtype=dtype),
        ids.new_empty((room,)),
        ids.new_empty((1 if returns_evicted else 0,)),
        ids.new_empty((room if counters.shape[0] > 1 else 0,), dtype=torch.int32),
    )


@torch.library.register_fake("torchrec_hkv::gather_rows")
def _(
    group: int, ids: Tensor, slots: Tensor, offsets: Tensor | None = None, batch_size: int = 1
) -> tuple[Tensor, Tensor]:
    shape = (slots.shape[0], _C.group_row_width(group))
    rows = slots.new_empty(shape, dtype=_C.group_row_dtype(group))
    return rows, torch.empty_like(slots, dtype=torch.bool)


@torch.library.register_fake("torchrec_hkv::write_rows")
def _(counters: Tensor, group: int, slots: Tensor, rows: Tensor, add: bool) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::touch")
def _(
    counters: Tensor,
    group: int,
    ids: Tensor,
    scores: Tensor | None,
    offsets: Tensor | None = None,
    batch_size: int = 1,
) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::erase_slots")
def _(counters: Tensor, group: int, slots: Tensor) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::select_slots")
def _(
    counters: Tensor,
    group: int,
    tables: list[int],
    score_at_least: int,
    score_at_most: int,
    touched_before: int,
) -> Tensor:
    layouts = [_C.table_layout(group, table) for table in tables]
    slots = sum(buckets * bucket_slots for *_, buckets, bucket_slots in layouts)
    return counters.new_empty((slots,), dtype=torch.bool)


@torch.library.register_fake("torchrec_hkv::export_slots")
def _(group: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = slots.shape[0]
    return (
        torch.empty_like(slots),
        slots.new_empty((n, _C.group_row_width(group)), dtype=_C.group_row_dtype(group)),
        torch.empty_like(slots),
        slots.new_empty((n, _C.group_state_dim(group)), dtype=torch.float32),
    )
