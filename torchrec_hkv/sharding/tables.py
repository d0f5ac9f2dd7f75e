"""Converts TorchRec's description of a table to the shards that backends take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TypeAlias

from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    PoolingType,
    data_type_to_dtype,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_hkv.backends.protocol import BackendOptions, TableShard

#: Row-wise sharding types. TorchRec sums over ranks, and divides a mean afterwards.
SUMMED_OVER_RANKS: frozenset[str] = frozenset(
    {
        ShardingType.ROW_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.GRID_SHARD.value,
    }
)


#: A module that may have tables on backends.
Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection

#: Child of a FeatureProcessedEmbeddingBagCollection that holds the tables, sharded or not.
PROCESSED_BAGS = "_embedding_bag_collection"


def collection_of(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module that holds the tables: the collection inside a module with feature processors, or
    the module itself.

    Args:
        path: path of the module in the model.
        module: a module that a sharder takes.

    Returns:
        Path and module.
    """
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return (f"{path}.{PROCESSED_BAGS}" if path else PROCESSED_BAGS), getattr(
            module, PROCESSED_BAGS
        )
    return path, module


def table_configs(module: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    """The configs of a module's tables by name.

    Args:
        module: a collection, or one with feature processors.
    """
    _, module = collection_of("", module)
    if isinstance(module, EmbeddingCollection):
        return {config.name: config for config in module.embedding_configs()}
    return {config.name: config for config in module.embedding_bag_configs()}


def table_weight(module: Collection, table: str) -> nn.Parameter:
    """The unsharded weight of a table, which carries the optimizer applied in backward."""
    tables = module.embeddings if isinstance(module, EmbeddingCollection) else module.embedding_bags
    return tables[table].weight


def check_config(config: BaseEmbeddingConfig) -> None:
    """Checks a table's config for values that no backend supports.

    Raises:
        ValueError: a size is not positive, or the config uses a feature of stock tables only.
    """
    for field in ("num_embeddings", "embedding_dim"):
        value = getattr(config, field)
        if value < 1:
            raise ValueError(f"Table {config.name!r} has {field}={value}: it must be at least 1.")
    if config.use_virtual_table:
        raise ValueError(
            f"Table {config.name!r} has use_virtual_table=True, which only TorchRec's own virtual "
            "table kernels serve: leave it False."
        )
    if config.num_embeddings_post_pruning is not None:
        raise ValueError(
            f"Table {config.name!r} has num_embeddings_post_pruning="
            f"{config.num_embeddings_post_pruning}, which only stock kernels serve: leave it None."
        )
    init_range(config)


def init_range(config: BaseEmbeddingConfig) -> tuple[float, float]:
    """The lowest and the highest initial value of a table's rows.

    If the config has no ``init_fn``, TorchRec sets it to ``uniform_`` between ``weight_init_min``
    and ``weight_init_max``, which default to plus and minus ``num_embeddings ** -0.5``. Rows in
    backends are initialized one by one, so no other function is supported.

    Raises:
        ValueError: the config has another ``init_fn``.
    """
    init_fn = config.init_fn
    if (
        isinstance(init_fn, functools.partial)
        and init_fn.func is nn.init.uniform_
        and not init_fn.args
        and set(init_fn.keywords) <= {"a", "b"}
    ):
        return (float(init_fn.keywords.get("a", 0.0)), float(init_fn.keywords.get("b", 1.0)))
    raise ValueError(
        f"Table {config.name!r} has init_fn={init_fn}, which can't be applied to rows that are "
        "initialized one by one: give weight_init_min and weight_init_max instead."
    )


def table_shard(
    *,
    name: str,
    num_embeddings: int,
    embedding_dim: int,
    data_type: DataType,
    pooling: PoolingType,
    sharding_type: str | None,
    sizes: Sequence[int],
    offsets: Sequence[int],
    init_range: tuple[float, float],
    options: BackendOptions,
    full_name: str = "",
) -> TableShard:
    """One shard of a table.

    Args:
        name: name of the table.
        num_embeddings: number of rows over all ranks.
        embedding_dim: number of columns over all ranks.
        data_type: data type of the rows.
        pooling: pooling of the config.
        sharding_type: sharding type, which decides whether the lookup sums for a mean; None for the
            whole table.
        sizes: number of rows and columns of the shard.
        offsets: first row and first column of the shard.
        init_range: lowest and highest initial value.
        options: the backend's options for this table.
        full_name: full name of the table in the model, for messages.
    """
    is_mean = pooling == PoolingType.MEAN and sharding_type not in SUMMED_OVER_RANKS
    rows = options.rows_for(num_embeddings)
    first, end = offsets[0], offsets[0] + sizes[0]
    if rows != num_embeddings:
        first, end = first * rows // num_embeddings, end * rows // num_embeddings
    return TableShard(
        name=name,
        capacity=end - first,
        dim=sizes[1],
        num_embeddings=rows,
        embedding_dim=embedding_dim,
        row_offset=first,
        column_offset=offsets[1],
        dtype=options.dtype_for(data_type_to_dtype(data_type)),
        pooling="mean" if is_mean else "sum",
        init_range=init_range,
        options=options,
        full_name=full_name,
    )


def config_shards(
    config: BaseEmbeddingConfig,
    sharding_type: str | None,
    sizes: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[int]],
    options: BackendOptions,
) -> list[TableShard]:
    """All shards of a table, from its config.

    Args:
        config: config of the table. A sequence table's config has no pooling; its bags of one id
            are summed.
        sharding_type: sharding type; None for the whole table.
        sizes: number of rows and columns of each shard.
        offsets: first row and first column of each shard.
        options: the backend's options for this table.

    Raises:
        ValueError: the config has an ``init_fn`` that is not supported.
    """
    initial = init_range(config)
    return [
        table_shard(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            data_type=config.data_type,
            pooling=getattr(config, "pooling", PoolingType.SUM),
            sharding_type=sharding_type,
            sizes=size,
            offsets=offset,
            init_range=initial,
            options=options,
        )
        for size, offset in zip(sizes, offsets, strict=True)
    ]


def balanced_rows(num_embeddings: int, world_size: int) -> tuple[list[int], list[int]]:
    """Splits a capacity evenly over ranks. TorchRec uses blocks of equal size, so that the last
    ranks may get few rows or none, although ids that are mapped by hash reach all ranks equally.

    Returns:
        Number of rows of each rank, and first row of each rank.
    """
    bounds = [num_embeddings * rank // world_size for rank in range(world_size + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)], bounds[:-1]
