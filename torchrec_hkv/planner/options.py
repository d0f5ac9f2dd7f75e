"""What the planner's parts ask of a sharding option whose table a backend would serve."""

from __future__ import annotations

from collections import defaultdict

from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import TableShard
from torchrec_hkv.planner.constraints import Assignment
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.tables import (
    SUMMED_OVER_RANKS,
    balanced_rows,
    config_shards,
    table_configs,
)


def is_ours(option: ShardingOption) -> bool:
    """Whether a backend would serve the table."""
    return option.compute_kernel == KERNEL


def config_of(option: ShardingOption) -> BaseEmbeddingConfig:
    """The config of an option's table."""
    return table_configs(option.module[1])[option.name]


def shards_of(option: ShardingOption, assignment: Assignment) -> list[TableShard]:
    """The shards of an option's table, as its backend is asked about them."""
    return config_shards(
        config_of(option),
        option.sharding_type,
        [shard.size for shard in option.shards],
        [shard.offset for shard in option.shards],
        assignment.options,
    )


def balance(option: ShardingOption, assignment: Assignment) -> None:
    """Gives every rank the same capacity where ids come to all ranks alike."""
    if option.sharding_type not in SUMMED_OVER_RANKS:
        return
    if not registry.get(assignment.backend).routes_by_hash(assignment.options):
        return
    by_columns: dict[int, list[Shard]] = defaultdict(list)
    for shard in option.shards:
        by_columns[shard.offset[1]].append(shard)
    for shards in by_columns.values():
        sizes, offsets = balanced_rows(option.tensor.shape[0], len(shards))
        for shard, size, offset in zip(shards, sizes, offsets, strict=True):
            shard.size = [size, shard.size[1]]
            shard.offset = [offset, shard.offset[1]]
