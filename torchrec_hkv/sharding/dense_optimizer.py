"""Optimizer states of tables whose rows lie open by number, as TorchRec shows those of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import TensorProperties
from torchrec.distributed.types import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
)

from torchrec_hkv.backends.protocol import TableShard


def sharded_state(
    table: ShardedTensorMetadata, shards: Sequence[TableShard], local: Sequence[torch.Tensor]
) -> ShardedTensor:
    """One state of a table over all ranks.

    Args:
        table: how its weight lies.
        shards: those of this rank.
        local: their states: ``[rows, width]``, which lie as the weight does, or ``[length]``, which
            are stacked in the order of columns, then rows.
    """
    order = sorted(table.shards_metadata, key=lambda shard: tuple(reversed(shard.shard_offsets)))
    is_flat = local[0].dim() == 1
    is_one_each = is_flat and local[0].numel() != shards[0].capacity
    columns = sorted({shard.shard_offsets[1] for shard in order})
    metadata: list[ShardMetadata] = []
    size = [0, 0]
    for shard in order:
        if is_flat:
            offsets, sizes = [size[0]], [1 if is_one_each else shard.shard_sizes[0]]
            size[0] += sizes[0]
        else:
            width = local[0].shape[1]
            # States as wide as the weight lie as it does; others beside each other by column.
            is_as_weight = width == shards[0].dim
            first = shard.shard_offsets[1] if is_as_weight else None
            first = columns.index(shard.shard_offsets[1]) * width if first is None else first
            offsets = [shard.shard_offsets[0], first]
            sizes = [shard.shard_sizes[0], shard.shard_sizes[1] if is_as_weight else width]
            size = [max(have, o + s) for have, o, s in zip(size, offsets, sizes, strict=True)]
        metadata.append(
            ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=shard.placement)
        )
    held = {
        (shard.row_offset, shard.column_offset): t for shard, t in zip(shards, local, strict=True)
    }
    rank = dist.get_rank()
    local_shards = [
        Shard(tensor=held[tuple(shard.shard_offsets)], metadata=state)
        for shard, state in zip(order, metadata, strict=True)
        if shard.placement.rank() == rank
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=local_shards,
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=metadata,
            size=torch.Size(size[:1] if is_flat else size),
            tensor_properties=TensorProperties(dtype=local[0].dtype),
        ),
    )
