"""Fakes of the operators that saves and loads call."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.stored_rows import stored_width


@torch.library.register_fake("torchrec_hkv::slot_owners")
def _(counters: Tensor, group: int, table: int, first: int, n: int) -> Tensor:
    return counters.new_empty((n,), dtype=torch.int32)


@torch.library.register_fake("torchrec_hkv::read_slots")
def _(group: int, table: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = slots.shape[0]
    dim, dtype, state_dim, keeps_scores, *_ = _C.table_layout(group, table)
    width = stored_width(dim, dtype)
    return (
        torch.empty_like(slots),
        slots.new_empty((n, width), dtype=dtype),
        slots.new_empty((n,), dtype=torch.int32),
        slots.new_empty((n if keeps_scores else 0,)),
        slots.new_empty((n, state_dim), dtype=torch.float32),
    )


@torch.library.register_fake("torchrec_hkv::restore_slots")
def _(
    counters: Tensor,
    group: int,
    table: int,
    slots: Tensor,
    ids: Tensor,
    rows: Tensor,
    last_steps: Tensor,
    scores: Tensor,
    states: Tensor,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.bool)


@torch.library.register_fake("torchrec_hkv::overwrite_slots")
def _(
    counters: Tensor,
    group: int,
    table: int,
    slots: Tensor,
    ids: Tensor,
    rows: Tensor,
    last_steps: Tensor,
    scores: Tensor,
    states: Tensor,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::restore_entries")
def _(
    counters: Tensor,
    group: int,
    table: int,
    ids: Tensor,
    rows: Tensor,
    last_steps: Tensor,
    scores: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = (ids, rows, last_steps, scores, states)
    return (*map(torch.empty_like, given), ids.new_empty((2,)))


@torch.library.register_fake("torchrec_hkv::find_misplaced")
def _(
    ids: Tensor,
    slots: Tensor,
    num_buckets: int,
    bucket_slots: int,
    owner_begin: int,
    owner_end: int,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.bool)
