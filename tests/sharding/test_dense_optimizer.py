"""Optimizer states over all ranks have the layout of stock tables."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import ShardedTensorMetadata, ShardMetadata

from tests.support.shards import table_shard
from torchrec_hkv import HKVOptions
from torchrec_hkv.sharding.kernels.dense_optimizer import sharded_state

# Two rows on one rank and one on the other, for each of two column shards.
GRID = [((0, 0), (2, 4), 0), ((2, 0), (1, 4), 1), ((0, 4), (2, 4), 0), ((2, 4), (1, 4), 1)]


def _states(rank, world_size, device, shape):
    metadata = ShardedTensorMetadata(
        shards_metadata=[
            ShardMetadata(list(offsets), list(sizes), _remote_device(f"rank:{holder}/cpu"))
            for offsets, sizes, holder in GRID
        ],
        size=torch.Size([3, 8]),
    )
    held = [(offsets, sizes) for offsets, sizes, holder in GRID if holder == rank]
    shards = [
        table_shard(rows, columns, HKVOptions(dense=True), row_offset=row, column_offset=column)
        for (row, column), (rows, columns) in held
    ]
    if shape == "row":
        local = [torch.ones(rows) for _, (rows, _) in held]
    else:
        local = [torch.ones(rows, 9) for _, (rows, _) in held]
    state = sharded_state(metadata, shards, local)
    return tuple(state.size()), [
        tuple(shard.shard_offsets) for shard in state.metadata().shards_metadata
    ]


@pytest.mark.parametrize(
    ("shape", "size", "offsets"),
    [
        ("row", (6,), [(0,), (2,), (3,), (5,)]),
        ("wide", (3, 18), [(0, 0), (2, 0), (0, 9), (2, 9)]),
    ],
)
def test_on_every_rank_alike(run_ranks, device_type, shape, size, offsets):
    if device_type == "cuda":
        pytest.skip("what lies where does not depend on the device")
    for got in run_ranks(2, _states, shape):
        assert got == (size, offsets)
