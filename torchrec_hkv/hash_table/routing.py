"""Assigns ids to ranks, and the operators with which ranks exchange ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ops = torch.ops.torchrec_hkv


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
        weights: float32, one per id, or None.

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
