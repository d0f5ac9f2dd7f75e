"""DMPCollection (2D parallelism) refuses tables whose replicas it could not synchronize."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection
from torchrec.distributed.types import ShardingStrategy

from tests.support.models import topology
from tests.support.sequences import SequenceModel, sequence_configs
from tests.support.two_dimensional import configs, constraints, make_collection
from torchrec_hkv import (
    DMPCollection,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)


def _refused(rank, world_size, device):
    def made(**kwargs):
        return make_collection(
            1, world_size, device, configs(), {**constraints(), **kwargs.pop("of", {})}, **kwargs
        )

    toy = ParameterConstraints(compute_kernels=["toy"])
    with pytest.raises(ValueError, match=r"Table 'hash' .* backend 'toy' can't sync replicas"):
        made(of={"hash": toy})
    cached = ParameterConstraints(compute_kernels=["tt"], options=TTOptions(cache_size=4))
    with pytest.raises(ValueError, match=r"Table 'cores' .* leave out cache_size"):
        made(of={"cores": cached})
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"sharding_strategy is .* needs a GPU"):
            made(sharding_strategy=ShardingStrategy.FULLY_SHARDED)


def test_refused(run_ranks):
    run_ranks(2, _refused)


def _sizes(rank, world_size, device):
    model = SequenceModel(EmbeddingCollection(sequence_configs(64), device=torch.device("meta")))
    planner = EmbeddingShardingPlanner(topology=topology(1, device))
    plan = planner.plan(model, get_default_sharders())
    for size in (0, 3):
        with pytest.raises(ValueError, match=f"sharding_group_size is {size}, but must divide"):
            DMPCollection(model, device, plan, world_size, size, dist.group.WORLD)


def test_a_group_size_that_does_not_divide(run_ranks):
    run_ranks(2, _sizes)
