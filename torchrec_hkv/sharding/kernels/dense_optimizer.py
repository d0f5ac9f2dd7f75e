"""Optimizer states of dense-compatible tables, in the form of TorchRec's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

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
    """One optimizer state of a table over all ranks.

    Args:
        table: metadata of the table's weight.
        shards: the shards on this rank.
        local: the states of these shards. ``[rows, width]`` is distributed like the weight.
            ``[rows]`` is stacked in the order of columns, then rows.
    """
    order = sorted(table.shards_metadata, key=lambda shard: tuple(reversed(shard.shard_offsets)))
    places = _stacked(order) if local[0].dim() == 1 else _concatenated(order, local[0])
    states = [
        ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=shard.placement)
        for shard, (offsets, sizes) in zip(order, places, strict=True)
    ]
    size = [
        max(offsets[dim] + sizes[dim] for offsets, sizes in places) for dim in range(local[0].dim())
    ]
    rank_shards = {
        (shard.row_offset, shard.column_offset): tensor
        for shard, tensor in zip(shards, local, strict=True)
    }
    rank = dist.get_rank()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[
            Shard(tensor=rank_shards[tuple(shard.shard_offsets)], metadata=state)
            for shard, state in zip(order, states, strict=True)
            if shard.placement.rank() == rank
        ],
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=states,
            size=torch.Size(size),
            tensor_properties=TensorProperties(dtype=local[0].dtype),
        ),
    )


#: Offsets and sizes of a shard.
_Place: TypeAlias = tuple[list[int], list[int]]


def _stacked(order: Sequence[ShardMetadata]) -> list[_Place]:
    """Places of states with one value for each row: one shard after the other."""
    places: list[_Place] = []
    first = 0
    for shard in order:
        places.append(([first], [shard.shard_sizes[0]]))
        first += shard.shard_sizes[0]
    return places


def _concatenated(order: Sequence[ShardMetadata], local: torch.Tensor) -> list[_Place]:
    """Places of states that are distributed like the weight. All shards of a table have the same
    width, and so do their states."""
    columns = sorted({shard.shard_offsets[1] for shard in order})
    width = local.shape[1]
    return [
        (
            [shard.shard_offsets[0], columns.index(shard.shard_offsets[1]) * width],
            [shard.shard_sizes[0], width],
        )
        for shard in order
    ]
