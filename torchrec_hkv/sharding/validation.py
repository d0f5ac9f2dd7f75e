"""Checks of a whole collection on every rank, before its first table is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard
from torchrec_hkv.compat import is_2d
from torchrec_hkv.sharding.embedding_sharding import SHARDINGS
from torchrec_hkv.sharding.optimizer import applied_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding
from torchrec_hkv.sharding.tables import check_config, config_shards, init_range


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """A table of ours as planned and checked.

    Attributes:
        backend: name of its backend.
        sharding: as the sharder passes it on to TorchRec.
        shards: all of them, on whatever rank.
        optimizer: None where none was applied.
    """

    backend: str
    sharding: BackendParameterSharding
    shards: list[TableShard]
    optimizer: OptimizerSpec | None


def planned_tables(
    module: EmbeddingBagCollection,
    shardings: dict[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    fused_params: dict[str, Any] | None,
) -> dict[str, PlannedTable]:
    """The tables of a collection that backends serve, checked.

    Args:
        module: the unsharded collection.
        shardings: the plan of its tables.
        env: the ranks.
        device: where the tables will live, the CPU when None.
        fused_params: the sharder's.

    Raises:
        ValueError: a table that its backend, or this package, can't serve as planned.
    """
    configs = {config.name: config for config in module.embedding_bag_configs()}
    planned: dict[str, PlannedTable] = {}
    for name, sharding in shardings.items():
        if name not in configs or sharding.compute_kernel != KERNEL:
            continue
        if not isinstance(sharding, BackendParameterSharding):
            raise ValueError(
                f"The plan gives table {name!r} the kernel {KERNEL!r} and no backend: make it with "
                "torchrec_hkv.EmbeddingShardingPlanner."
            )
        _check_environment(name, env)
        config = configs[name]
        check_config(config)
        check_sharding_type(name, sharding.backend, sharding.sharding_type)
        backend = registry.get(sharding.backend)
        optimizer = applied_optimizer(name, module.embedding_bags[name].weight, fused_params)
        shards = config_shards(
            config,
            config.pooling,
            sharding.sharding_type,
            [shard.shard_sizes for shard in sharding.sharding_spec.shards],
            [shard.shard_offsets for shard in sharding.sharding_spec.shards],
            sharding.options,
        )
        for shard in shards:
            backend.check(shard, optimizer, (device or torch.device("cpu")).type)
        sharding = dataclasses.replace(sharding, init_range=init_range(config))
        planned[name] = PlannedTable(sharding.backend, sharding, shards, optimizer)
    return planned


def check_sharding_type(table: str, backend: str, sharding_type: str) -> None:
    """Refuses a sharding type that a backend, or this package, can't serve.

    Raises:
        ValueError: naming those it can.
    """
    allowed = served_sharding_types(backend)
    if sharding_type not in allowed:
        raise ValueError(
            f"Table {table!r} can't be sharded {sharding_type!r} on backend {backend!r}: "
            f"allowed are {allowed}."
        )


def served_sharding_types(backend: str) -> list[str]:
    """The sharding types of a backend that this package knows, sorted."""
    return sorted(set(registry.get(backend).sharding_types) & set(SHARDINGS))


def _check_environment(table: str, env: ShardingEnv) -> None:
    if is_2d(env):
        raise ValueError(
            f"Table {table!r} is served by a backend, whose replicas DMPCollection would not keep "
            "in step: use DistributedModelParallel."
        )
    if env.output_dtensor:
        raise ValueError(
            f"Table {table!r} is served by a backend, which gives its state as ShardedTensors: "
            "leave output_dtensor off."
        )
