"""A small model of TorchRec's modules, and functions to shard it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints as StockParameterConstraints
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support import toy_backend
from torchrec_hkv import EmbeddingShardingPlanner, get_default_sharders

toy_backend.install()


class Model(nn.Module):
    """Pooled features, projected by a fixed vector."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = collection
        tables = collection.embedding_bag_configs()
        features = [feature for table in tables for feature in table.feature_names]
        # A feature of several tables has a key for each.
        self.keys = sorted(
            feature if features.count(feature) == 1 else f"{feature}@{table.name}"
            for table in tables
            for feature in table.feature_names
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns ``[batch, dims]`` by key, because the order of tables depends on the plan."""
        pooled = self.ebc(features)
        return torch.cat([pooled[key] for key in self.keys], dim=1)


def make_model(
    tables: Sequence[EmbeddingBagConfig],
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    *,
    is_weighted: bool = False,
    device: torch.device | None = None,
) -> Model:
    """Creates an unsharded model.

    Args:
        tables: tables of its only collection.
        optimizer: optimizer to apply in backward, or None.
        optimizer_kwargs: arguments of the optimizer; a learning rate of 0.1 if None.
        is_weighted: whether the collection is weighted.
        device: device of the unsharded weights; meta if None.
    """
    collection = EmbeddingBagCollection(
        tables=list(tables),
        device=torch.device("meta") if device is None else device,
        is_weighted=is_weighted,
    )
    if optimizer is not None:
        apply_optimizer_in_backward(
            optimizer, collection.parameters(), dict(optimizer_kwargs or {"lr": 0.1})
        )
    return Model(collection)


def topology(world_size: int, device: torch.device) -> Topology:
    """Returns the topology with hosts of ``LOCAL_WORLD_SIZE`` ranks; one host if it is not set."""
    host_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Topology(world_size=world_size, local_world_size=host_size, compute_device=device.type)


def plan_model(
    model: Model,
    constraints: Mapping[str, StockParameterConstraints],
    world_size: int,
    device: torch.device,
    sharders: list | None = None,
) -> ShardingPlan:
    """Returns the plan, on every rank."""
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, device), constraints=dict(constraints), batch_size=8
    )
    return planner.collective_plan(model, sharders or get_default_sharders(), dist.group.WORLD)


def shard_model(
    model: Model,
    constraints: Mapping[str, StockParameterConstraints],
    world_size: int,
    device: torch.device,
    sharders: list | None = None,
) -> DistributedModelParallel:
    """Plans a model and shards it."""
    sharders = sharders or get_default_sharders()
    plan = plan_model(model, constraints, world_size, device, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def local_tables(model: DistributedModelParallel) -> dict[str, Any]:
    """Returns the lookup of each backend table on this rank, by table name."""
    return model.module.ebc.group_lookups()
