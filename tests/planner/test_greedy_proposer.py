"""The greedy proposer makes the same proposals as TorchRec's, in the same order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.proposers import GreedyProposer as StockGreedyProposer
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage

from torchrec_hkv.planner.proposer import GreedyProposer

pytestmark = pytest.mark.compat


def _option(draw, table, few):
    size = (lambda: draw.choice([0, 1, 2])) if few else (lambda: draw.randint(0, 1 << 40))
    shards = [
        Shard([1, 1], [i, 0], Storage(hbm=size(), ddr=size()), Perf(draw.random(), 0, 0, 0))
        for i in range(draw.randint(1, 4))
    ]
    return ShardingOption(
        name=f"t{table}",
        tensor=torch.empty(4, 4, device="meta"),
        module=("m", nn.Module()),
        input_lengths=[1.0],
        batch_size=8,
        sharding_type="table_wise",
        partition_by="device",
        compute_kernel="fused",
        shards=shards,
        is_pooled=True,
    )


def _proposals(proposer, space):
    proposer.load(search_space=list(space))
    found = []
    while (proposal := proposer.propose()) is not None:
        found.append([id(option) for option in proposal])
        proposer.feedback(partitionable=True)
    return found


@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("use_depth", [False, True])
def test_same_proposals(use_depth, few_sizes):
    draw = random.Random()
    for _ in range(20):
        space = [
            _option(draw, table, few_sizes)
            for table in range(draw.randint(1, 6))
            for _ in range(draw.randint(1, 5))
        ]
        draw.shuffle(space)
        stock = _proposals(StockGreedyProposer(use_depth=use_depth), space)
        assert _proposals(GreedyProposer(use_depth=use_depth), space) == stock
