"""Fake implementations of the ops ``torch.ops.torchrec_hkv.*``, and functions that call some ops.

Schemas and kernels are in ``csrc/bindings``. The dispatcher only takes tensors and numbers, so ops
identify a group of tables by its handle. :class:`torchrec_hkv.hash_table.TableGroup` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.stored_rows import stored_width

_ops = torch.ops.torchrec_hkv


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
    size = torch.library.get_ctx().new_dynamic_size()  # it depends on the batches before
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


@torch.library.register_fake("torchrec_hkv::insert")
def _(
    counters: Tensor,
    group: int,
    ids: Tensor,
    scores: Tensor | None,
    rows: Tensor | None,
    believed: Tensor | None,
    initialize: bool,
    assign: bool,
    leavers: bool,
    offsets: Tensor | None = None,
    batch_size: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    room = ids.shape[0] if leavers else 0
    dtype, dim = _C.group_row_dtype(group), _C.group_row_width(group)
    return (
        torch.empty_like(ids),
        torch.empty_like(ids, dtype=torch.bool),
        ids.new_empty((room,)),
        ids.new_empty((room, dim), dtype=dtype),
        ids.new_empty((room,)),
        ids.new_empty((1 if leavers else 0,)),
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


@torch.library.register_fake("torchrec_hkv::expire")
def _(counters: Tensor, group: int) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::export_slots")
def _(group: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = slots.shape[0]
    return (
        torch.empty_like(slots),
        slots.new_empty((n, _C.group_row_width(group)), dtype=_C.group_row_dtype(group)),
        torch.empty_like(slots),
        slots.new_empty((n, _C.group_state_dim(group)), dtype=torch.float32),
    )


@torch.library.register_fake("torchrec_hkv::slot_owners")
def _(counters: Tensor, group: int, table: int, first: int, n: int) -> Tensor:
    return counters.new_empty((n,), dtype=torch.int32)


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
    group: int, table: int, slots: Tensor, is_new: Tensor, records: Tensor, states: bool
) -> Tensor:
    _, _, _, keeps_scores, *_ = _C.table_layout(group, table)
    return slots.new_empty((slots.shape[0] if keeps_scores else 0,))


@torch.library.register_fake("torchrec_hkv::merge_records")
def _(
    counters: Tensor,
    group: int,
    table: int,
    slots: Tensor,
    ids: Tensor,
    known: Tensor,
    records: Tensor,
    theirs: Tensor,
    scores: Tensor,
    states: bool,
    highest_column: int,
) -> None:
    return None


@torch.library.register_fake("torchrec_hkv::distinct_ids")
def _(ids: Tensor) -> tuple[Tensor, Tensor]:
    distinct = ids.new_empty((torch.library.get_ctx().new_dynamic_size(),))
    return distinct, torch.empty_like(ids)


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


@torch.library.register_fake("torchrec_hkv::bucketize")
def _(
    lengths: Tensor,
    values: Tensor,
    block_sizes: Tensor,
    world_size: int,
    weights: Tensor | None = None,
    blocks: bool = False,
    permutes: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    words = values.shape[0] + (world_size * lengths.shape[0] if blocks else 0)
    return (
        lengths.new_empty((world_size * lengths.shape[0],)),
        values.new_empty((words,)),
        values.new_empty((0,) if weights is None else values.shape, dtype=torch.float32),
        values.new_empty(values.shape if permutes else (0,)),
    )


@torch.library.register_fake("torchrec_hkv::count_ids")
def _(lengths: Tensor, at: Tensor, samples_at: Tensor, batch_size: int, size: int) -> Tensor:
    return at.new_empty((size,))


@torch.library.register_fake("torchrec_hkv::pack_blocks")
def _(
    lengths: Tensor, values: Tensor, num_lengths: Sequence[int], num_values: Sequence[int]
) -> Tensor:
    return values.new_empty((sum(num_lengths) + sum(num_values),))


@torch.library.register_fake("torchrec_hkv::merge_blocks")
def _(
    words: Tensor,
    weights: Tensor | None,
    counts: Tensor,
    order: Tensor,
    num_ranks: int,
    batch_size: int,
    lengths_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bags = order.shape[0] * batch_size
    ids = words.shape[0] - bags
    return (
        words.new_empty((bags,), dtype=lengths_dtype),
        words.new_empty((bags + 1,)),
        words.new_empty((ids,)),
        words.new_empty((0,) if weights is None else (ids,), dtype=torch.float32),
    )


@torch.library.register_fake("torchrec_hkv::owner_ranks")
def _(ids: Tensor, world_size: int) -> Tensor:
    return torch.empty_like(ids)


def owner_rank(ids: Tensor, world_size: int) -> Tensor:
    """The rank that owns each id of a hashed table under row-wise sharding.

    Each id belongs to one of 65,536 owner buckets, the top 16 bits of a mix of the id. Ranks own
    contiguous ranges of buckets. The owner therefore depends on the id and the world size only.

    Args:
        ids: int64 of any shape and device; the ranks are computed on the CPU.
        world_size: number of ranks, at least 1.

    Returns:
        int64 ranks, with the shape and device of ``ids``.
    """
    return _ops.owner_ranks(ids.cpu(), world_size).to(ids.device)


def bucketize(
    lengths: Tensor,
    values: Tensor,
    block_sizes: Tensor,
    world_size: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Sorts the ids of all features by the rank that owns them.

    Args:
        lengths: int32 or int64 ``[features * batch_size]``, feature-major.
        values: int64 ids, bag after bag.
        block_sizes: int64 ``[features]``. 0: hashed routing (:func:`owner_rank`), ids are not
            changed. Otherwise TorchRec's contiguous blocks: row ``r`` goes to rank ``r // block``
            as ``r % block``.
        world_size: number of ranks.
        weights: float32, one for each id, or None.

    Returns:
        ``(lengths, values, weights, unbucketize_permute)``. Lengths are rank-major
        ``[world_size * features * batch_size]``. Ids of a bag keep their order.
        ``unbucketize_permute[i]`` is the new position of id ``i``.

    Raises:
        TypeError: an argument has another dtype.
        ValueError: an argument has another length.
    """
    out = _ops.bucketize(lengths, values, block_sizes, world_size, weights)
    return out[0], out[1], None if weights is None else out[2], out[3]
