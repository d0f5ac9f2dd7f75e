"""Plans and process groups that backends do not support are refused with one sentence."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
)

from tests.support.models import make_model, topology
from tests.support.small_models import make_small
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders

CPU = torch.device("cpu")


class _Env2D(ShardingEnv2D):
    def __init__(self):
        self.output_dtensor = True


def _sharder_and_plan(world_size=1):
    table = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])
    model = make_model([table])
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, CPU),
        constraints={"t": ParameterConstraints(compute_kernels=["toy"])},
    )
    sharders = get_default_sharders()
    plan = planner.plan(model, sharders).plan["ebc"]
    return next(s for s in sharders if s.module_type is type(model.ebc)), model.ebc, plan


def test_replicated_groups_of_ranks():
    sharder, module, plan = _sharder_and_plan()
    with pytest.raises(ValueError, match=r"Table 't' .*: use torchrec_hkv\.DMPCollection"):
        sharder.shard(module, plan, _Env2D(), CPU)


def test_dtensor_states():
    sharder, module, plan = _sharder_and_plan()
    env = ShardingEnv(world_size=1, rank=0)
    env.output_dtensor = True
    with pytest.raises(ValueError, match=r"Table 't' .* leave output_dtensor off"):
        sharder.shard(module, plan, env, CPU)


def test_a_plan_that_names_no_backend():
    sharder, module, plan = _sharder_and_plan()
    bare = EmbeddingModuleShardingPlan(
        {
            "t": ParameterSharding(
                sharding_type=plan["t"].sharding_type,
                compute_kernel="customized_kernel",
                ranks=plan["t"].ranks,
                sharding_spec=plan["t"].sharding_spec,
            )
        }
    )
    with pytest.raises(
        ValueError, match=r"make the plan with torchrec_hkv\.EmbeddingShardingPlanner"
    ):
        sharder.shard(module, bare, ShardingEnv(world_size=1, rank=0), CPU)


def test_a_plan_with_a_sharding_type_that_is_not_served():
    sharder, module, plan = _sharder_and_plan()
    plan = copy.deepcopy(plan)
    plan["t"].sharding_type = "data_parallel"
    with pytest.raises(ValueError, match=r"'data_parallel' on backend 'toy': allowed are"):
        sharder.shard(module, plan, ShardingEnv(world_size=1, rank=0), CPU)


def _reshard(rank, world_size, device):
    model = make_small(world_size, device, "toy")
    with pytest.raises(ValueError, match=r"Tables \['t'\] .* can't be resharded by update_shards"):
        model.module.ebc.update_shards({}, ShardingEnv(world_size=1, rank=0), device)


def test_resharding_while_training(run_ranks):
    run_ranks(1, _reshard)
