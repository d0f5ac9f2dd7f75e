"""The kernel and the sharding type that the planner chooses for a table."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.sharding import BackendParameterSharding

pytestmark = pytest.mark.compat


def _plan(constraints, world_size=2, rows=64, dim=4, device="cpu", **kwargs):
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]),
        EmbeddingBagConfig(name="s", num_embeddings=64, embedding_dim=4, feature_names=["g"]),
    ]
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, torch.device(device)),
        constraints=constraints,
        batch_size=8,
        **kwargs,
    )
    return planner.plan(make_model(tables), get_default_sharders()).plan["ebc"]


def test_a_table_that_names_no_backend_gets_none():
    plan = _plan({"t": ParameterConstraints(compute_kernels=["toy"])})
    assert isinstance(plan["t"], BackendParameterSharding)
    assert plan["t"].backend == "toy"
    assert not isinstance(plan["s"], BackendParameterSharding)
    assert plan["s"].compute_kernel in ("fused", "dense")


def test_without_constraints_nothing_changes():
    plan = _plan(None)
    assert {sharding.compute_kernel for sharding in plan.values()} <= {"fused", "dense"}
    by_rows = {"row_wise", "table_row_wise", "grid_shard"}
    assert not by_rows & {sharding.sharding_type for sharding in plan.values()}


def test_a_backend_is_costed_beside_stock_kernels():
    # The toy backend claims to read rows at a hundredth of the host's bandwidth.
    both = ParameterConstraints(
        compute_kernels=["toy", "fused"],
        sharding_types=["table_wise"],
        batch_sizes=[1 << 20],
        pooling_factors=[100.0],
    )
    assert _plan({"t": both})["t"].compute_kernel == "fused"


@pytest.mark.parametrize(
    "sharding_type",
    [
        "row_wise",
        "table_wise",
        "column_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sharding_type_asked_for(sharding_type, device):
    constraint = ParameterConstraints(
        compute_kernels=["toy"], sharding_types=[sharding_type], min_partition=4
    )
    plan = _plan({"t": constraint}, dim=8, device=device)
    assert plan["t"].sharding_type == sharding_type
    assert plan["t"].backend == "toy"


def test_a_type_that_is_not_served_is_passed_over_beside_one_that_is():
    constraint = ParameterConstraints(
        compute_kernels=["toy"], sharding_types=["data_parallel", "row_wise"]
    )
    assert _plan({"t": constraint})["t"].sharding_type == "row_wise"


def test_hashed_ids_come_to_ranks_of_equal_capacity():
    constraint = ParameterConstraints(compute_kernels=["toy"], sharding_types=["row_wise"])
    shards = _plan({"t": constraint}, world_size=4, rows=9)["t"].sharding_spec.shards
    # TorchRec's own split would be 3, 3, 3, 0.
    assert [shard.shard_sizes[0] for shard in shards] == [2, 2, 2, 3]
    assert [shard.shard_offsets[0] for shard in shards] == [0, 2, 4, 6]


@pytest.mark.parametrize("sharding_type", ["table_row_wise", "grid_shard"])
def test_so_do_they_on_the_ranks_of_a_host(sharding_type):
    constraint = ParameterConstraints(
        compute_kernels=["toy"], sharding_types=[sharding_type], min_partition=4
    )
    shards = _plan({"t": constraint}, world_size=4, rows=9, dim=8)["t"].sharding_spec.shards
    columns = {"table_row_wise": [0], "grid_shard": [0, 4]}[sharding_type]
    for first in columns:
        of_columns = [shard for shard in shards if shard.shard_offsets[1] == first]
        assert [shard.shard_sizes[0] for shard in of_columns] == [2, 2, 2, 3]
        assert [shard.shard_offsets[0] for shard in of_columns] == [0, 2, 4, 6]
        assert {shard.shard_sizes[1] for shard in of_columns} == {8 // len(columns)}
