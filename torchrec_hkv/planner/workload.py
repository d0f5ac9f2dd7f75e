"""The work of a step on each shard of a table, for a given sharding."""

from __future__ import annotations

import math

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_hkv.backends.workload import IdFrequencies, Workload
from torchrec_hkv.planner.options import config_of


def shard_workload(
    option: ShardingOption,
    topology: Topology,
    constraint: ParameterConstraints | None,
    frequencies: IdFrequencies | None,
    batches: int = 1,
) -> Workload:
    """The step's ids in one shard. All shards of a table get the same number of ids.

    Args:
        option: the sharding of the table.
        topology: the topology of the ranks.
        constraint: constraint with batch sizes and numbers of poolings, if they differ from the
            planner's.
        frequencies: frequencies of the table's ids; None if all rows are equally frequent.
        batches: number of batches of each rank that are counted together.
    """
    rows = option.tensor.shape[0]
    bags = batches * rank_bags(option, constraint)
    ids = batches * rank_ids(option, constraint)
    ranks = topology.world_size
    # Ids are spread over the shards of all ranks, over those of one host, or go to one shard.
    match option.sharding_type:
        case ShardingType.DATA_PARALLEL.value:
            return _rank_workload(ids, 1.0, bags, option.is_pooled, rows, frequencies)
        case ShardingType.ROW_WISE.value:
            share = 1 / ranks
        case ShardingType.TABLE_ROW_WISE.value | ShardingType.GRID_SHARD.value:
            share = 1 / min(ranks, topology.local_world_size)
        case _:
            share = 1.0
    return _rank_workload(ids * ranks, share, bags * ranks, option.is_pooled, rows, frequencies)


def rank_bags(option: ShardingOption, constraint: ParameterConstraints | None) -> float:
    """Number of bags for a table in a rank's batch.

    Args:
        option: the sharding of the table.
        constraint: see :func:`shard_workload`.
    """
    return sum(size * times for size, times, _ in _by_feature(option, constraint))


def rank_ids(option: ShardingOption, constraint: ParameterConstraints | None) -> float:
    """Number of ids for a table in a rank's batch.

    Args:
        option: the sharding of the table.
        constraint: see :func:`shard_workload`.
    """
    return sum(size * times * length for size, times, length in _by_feature(option, constraint))


def _by_feature(
    option: ShardingOption, constraint: ParameterConstraints | None
) -> list[tuple[float, float, float]]:
    """For each feature: samples of a batch, bags of a sample, and ids of a bag."""
    features = num_features(option)
    lengths = _per_feature(option.input_lengths, features)
    poolings = _per_feature((constraint and constraint.num_poolings) or [1.0], features)
    sizes = _per_feature((constraint and constraint.batch_sizes) or [option.batch_size], features)
    return list(zip(sizes, poolings, lengths, strict=True))


def _rank_workload(
    ids: float,
    share: float,
    bags: float,
    is_pooled: bool,
    rows: int,
    frequencies: IdFrequencies | None,
) -> Workload:
    if frequencies is not None:
        distinct = frequencies.distinct(ids)
    elif rows > 1:
        distinct = -rows * math.expm1(ids * math.log1p(-1 / rows))
    else:
        distinct = min(ids, 1.0)
    return Workload(
        ids=ids * share,
        distinct=distinct * share,
        bags=bags if is_pooled else ids * share,
        frequencies=frequencies,
        share=share,
    )


def num_features(option: ShardingOption) -> int:
    """Number of features that look a table up."""
    if isinstance(option.module[1], EmbeddingBagCollection | EmbeddingCollection):
        return len(config_of(option).feature_names)
    return option.num_inputs


def _per_feature(values: list[float], features: int) -> list[float]:
    """One value for each feature. TorchRec's constraints have a single value by default."""
    return list(values) if len(values) == features else [values[0]] * features
