"""Checks of a whole collection on every rank, before the first table is created."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard
from torchrec_hkv.compat import is_2d
from torchrec_hkv.sharding.dists.scores import check_score_source
from torchrec_hkv.sharding.kernels.optimizer import applied_optimizer
from torchrec_hkv.sharding.kernels.output_dtype import check_output_dtypes
from torchrec_hkv.sharding.modules.embedding_sharding import POOLED_SHARDINGS, SEQUENCE_SHARDINGS
from torchrec_hkv.sharding.parameter_sharding import KERNEL, BackendParameterSharding
from torchrec_hkv.sharding.tables import (
    Collection,
    check_config,
    config_shards,
    init_range,
    table_configs,
    table_weight,
)

_syncs_replicas: ContextVar[bool] = ContextVar("replicas are synced", default=False)


@contextlib.contextmanager
def replicas_synced() -> Iterator[None]:
    """A context in which the caller syncs sharded collections with their replicas."""
    token = _syncs_replicas.set(True)
    try:
        yield
    finally:
        _syncs_replicas.reset(token)


@dataclasses.dataclass(frozen=True)
class PlannedTable:
    """A planned and checked table on a backend.

    Attributes:
        backend: name of the backend.
        sharding: the sharding that is passed to TorchRec.
        shards: the shards on all ranks.
        optimizer: the fused optimizer.
        features: the features that look up the table.
    """

    backend: str
    sharding: BackendParameterSharding
    shards: list[TableShard]
    optimizer: OptimizerSpec
    features: list[str]


def planned_tables(
    module: Collection,
    shardings: dict[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    fused_params: dict[str, Any] | None,
) -> dict[str, PlannedTable]:
    """Checks the tables of a collection that are on backends, and returns them by name.

    Args:
        module: the unsharded collection.
        shardings: the plan of its tables.
        env: the ranks.
        device: device of the tables; None for the CPU.
        fused_params: fused parameters of the sharder.

    Raises:
        ValueError: a table can't be served as planned.
    """
    check_output_dtypes(
        {name: sharding for name, sharding in shardings.items() if name in table_configs(module)},
        fused_params,
    )
    configs = table_configs(module)
    if isinstance(module, EmbeddingCollection):
        _check_column_shards(
            {name: table_sharding for name, table_sharding in shardings.items() if name in configs}
        )
    planned: dict[str, PlannedTable] = {}
    for name, sharding in shardings.items():
        if name not in configs or sharding.compute_kernel != KERNEL:
            continue
        if not isinstance(sharding, BackendParameterSharding):
            raise ValueError(
                f"The plan gives table {name!r} the kernel {KERNEL!r} without a backend: make the "
                "plan with torchrec_hkv.EmbeddingShardingPlanner."
            )
        if env.output_dtensor and not is_2d(env):
            raise ValueError(
                f"Table {name!r} is served by a backend, which gives its state as ShardedTensors: "
                "leave output_dtensor off."
            )
        config = configs[name]
        check_config(config)
        check_score_source(name, config.feature_names, sharding.options)
        check_sharding_type(name, sharding.backend, [sharding.sharding_type], type(module))
        backend = registry.get(sharding.backend)
        optimizer = applied_optimizer(name, table_weight(module, name), fused_params)
        # A data-parallel table has no sharding spec: every rank holds all of it.
        spec = sharding.sharding_spec
        full_size = [[config.num_embeddings, config.embedding_dim]]
        shards = config_shards(
            config,
            sharding.sharding_type,
            full_size if spec is None else [shard.shard_sizes for shard in spec.shards],
            [[0, 0]] if spec is None else [shard.shard_offsets for shard in spec.shards],
            sharding.options,
        )
        for shard in shards:
            backend.check(shard, optimizer, (device or torch.device("cpu")).type)
            if is_2d(env) and sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
                if not _syncs_replicas.get():
                    raise ValueError(
                        f"Table {name!r} is served by a backend, whose replicas TorchRec's "
                        "DMPCollection does not sync: use torchrec_hkv.DMPCollection."
                    )
                backend.check_replicas(shard)
        sharding = dataclasses.replace(sharding, init_range=init_range(config))
        planned[name] = PlannedTable(
            sharding.backend, sharding, shards, optimizer, list(config.feature_names)
        )
    return planned


def _check_column_shards(shardings: Mapping[str, ParameterSharding]) -> None:
    """Checks that the column shards of an ``EmbeddingCollection`` have the same number of columns.
    TorchRec takes it for granted when it sends rows, and may overwrite memory otherwise.

    Raises:
        ValueError: they have not.
    """
    first: tuple[str, int] | None = None
    for name, sharding in shardings.items():
        spec = sharding.sharding_spec
        if sharding.sharding_type != ShardingType.COLUMN_WISE.value or spec is None:
            continue
        for shard in spec.shards:
            first = first or (name, shard.shard_sizes[1])
            if shard.shard_sizes[1] != first[1]:
                raise ValueError(
                    f"Table {name!r} has a shard of {shard.shard_sizes[1]} columns and table "
                    f"{first[0]!r} one of {first[1]}, but column shards in an EmbeddingCollection "
                    "must have the same number of columns: give their constraints the same "
                    "min_partition, a divisor of embedding_dim, or another sharding type."
                )


def check_sharding_type(
    table: str,
    backend: str,
    sharding_types: Sequence[str],
    module_type: type[Collection] | None = None,
) -> None:
    """Checks that at least one of some sharding types is supported.

    Args:
        table: name of the table, for the message.
        backend: name of the backend.
        sharding_types: the requested sharding types.
        module_type: class of the table's collection; None if unknown.

    Raises:
        ValueError: none is supported; the message lists the supported ones.
    """
    allowed = served_sharding_types(backend, module_type)
    if not set(sharding_types) & set(allowed):
        where = "" if module_type is None else f" in an {module_type.__name__}"
        raise ValueError(
            f"Table {table!r}{where} can't be sharded {sharding_types[0]!r} on backend "
            f"{backend!r}: allowed are {allowed}."
        )


def served_sharding_types(backend: str, module_type: type[Collection] | None = None) -> list[str]:
    """The sharding types that a backend and this package support, sorted.

    Args:
        backend: name of the backend.
        module_type: class of the table's collection; None for any.
    """
    supported = set() if module_type is EmbeddingCollection else set(POOLED_SHARDINGS)
    if module_type is None or module_type is EmbeddingCollection:
        supported |= set(SEQUENCE_SHARDINGS)
    return sorted(set(registry.get(backend).sharding_types) & supported)
