"""What the planner's parts ask of a sharding option whose table a backend would serve."""

from __future__ import annotations

from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import TableShard
from torchrec_hkv.planner.constraints import Assignment
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.tables import balanced_rows, config_shards, table_configs


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
    is_row_wise = option.sharding_type == ShardingType.ROW_WISE.value
    if not is_row_wise or registry.get(assignment.backend).routing != "hashed":
        return
    rows, columns = option.tensor.shape
    sizes, offsets = balanced_rows(rows, len(option.shards))
    for shard, size, offset in zip(option.shards, sizes, offsets, strict=True):
        shard.size = [size, columns]
        shard.offset = [offset, 0]
