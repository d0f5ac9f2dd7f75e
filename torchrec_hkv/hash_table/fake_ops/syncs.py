"""Fakes of the operators that deltas and syncs of replicas call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C


@torch.library.register_fake("torchrec_hkv::slot_changes")
def _(
    counters: Tensor,
    group: int,
    table: int,
    first: int,
    occupied: Tensor,
    marked: Tensor | None,
    since: int,
    moved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n = torch.library.get_ctx().new_dynamic_size()
    slots = occupied.new_empty((n,), dtype=torch.int64)
    return slots, occupied.new_empty((n,), dtype=torch.uint8), torch.empty_like(slots)


@torch.library.register_fake("torchrec_hkv::exchange_contents")
def _(
    snapshot_ids: Tensor, snapshot_occupied: Tensor, slots: Tensor, ids: Tensor, occupied: Tensor
) -> Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torchrec_hkv::read_values")
def _(group: int, table: int, slots: Tensor, values: Tensor, states: bool) -> tuple[Tensor, Tensor]:
    n = slots.shape[0]
    _, _, _, keeps_scores, *_ = _C.table_layout(group, table)
    return slots.new_empty((n,), dtype=torch.int32), slots.new_empty((n if keeps_scores else 0,))


@torch.library.register_fake("torchrec_hkv::write_values")
def _(
    counters: Tensor,
    group: int,
    table: int,
    slots: Tensor,
    ids: Tensor,
    values: Tensor,
    last_steps: Tensor,
    scores: Tensor,
    states: bool,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::compare_slots")
def _(
    counters: Tensor,
    group: int,
    table: int,
    first: int,
    ids: Tensor,
    occupied: Tensor,
    marked: Tensor | None,
    since: int,
    moved: bool,
    freed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    now = ids.new_empty((torch.library.get_ctx().new_dynamic_size(),))
    gone = ids.new_empty((torch.library.get_ctx().new_dynamic_size(),))
    marks = torch.empty_like(now, dtype=torch.bool)
    return (
        now,
        torch.empty_like(now),
        marks,
        torch.empty_like(marks),
        gone,
        torch.empty_like(gone),
    )


@torch.library.register_fake("torchrec_hkv::pack_records")
def _(
    group: int,
    table: int,
    slots: Tensor,
    is_new: Tensor,
    first: int,
    end: int,
    message: Tensor,
    begin: int,
    states: bool,
) -> Tensor:
    _, _, _, keeps_scores, *_ = _C.table_layout(group, table)
    return slots.new_empty((end - first if keeps_scores else 0,))


@torch.library.register_fake("torchrec_hkv::merge_records")
def _(
    counters: Tensor,
    group: int,
    table: int,
    slots: Tensor,
    ids: Tensor,
    known: Tensor,
    first: int,
    end: int,
    message: Tensor,
    theirs: Tensor,
    begin: int,
    scores: Tensor,
    states: bool,
    highest_column: int,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::merge_ids")
def _(
    group: int, table: int, ids: Sequence[Tensor], sizes: Sequence[int], own: int, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size
    touched = slots.new_empty((size(),))
    known = torch.empty_like(touched, dtype=torch.bool)
    here = (known, torch.empty_like(known), torch.empty_like(known), torch.empty_like(touched))
    left, absent = slots.new_empty((size(),)), slots.new_empty((size(),))
    return touched, *here, left, torch.empty_like(slots), absent
