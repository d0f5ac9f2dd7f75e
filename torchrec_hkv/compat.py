"""Differences between TorchRec 1.6 and 1.9, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.planner.shard_estimators import _calculate_storage_specific_sizes
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt


def sharder_fused_params(
    option: ShardingOption, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``fused_params`` of the sharder for an option's module.

    Args:
        option: the option being estimated.
        args: positional arguments of ``ShardEstimator.estimate`` after the options.
        kwargs: its keyword arguments: ``sharder_map`` (sharders) up to 1.6, ``sharder_data_map``
            (their data) from 1.7. Both have the same keys, and values with ``fused_params``.
    """
    sharders = [*args, *kwargs.values()][0]
    return dict(sharders[sharder_name(type(option.module[1]))].fused_params or {})


def stock_table_bytes(option: ShardingOption) -> list[int]:
    """TorchRec's estimate of rows and optimizer states of each shard of an option, in bytes.

    Does not include communication buffers. Only for kernels without a cache.
    """
    tensor = option.tensor
    optimizer_classes: list[type[torch.optim.Optimizer] | None] = getattr(
        tensor, "_optimizer_classes", [None]
    )
    return _calculate_storage_specific_sizes(
        storage=tensor.element_size() * tensor.nelement(),
        shape=tensor.shape,
        shard_sizes=[shard.size for shard in option.shards],
        sharding_type=option.sharding_type,
        optimizer_class=optimizer_classes[0],
    )


def ranks_of_host(topology: Topology) -> int:
    """Number of ranks of a host, or of a group of hosts if the topology has such groups. Older
    versions have none."""
    return getattr(topology, "intra_group_size", topology.local_world_size)


def to_keyed_jagged_tensor(features: Any) -> KeyedJaggedTensor:
    """Converts a batch to a KeyedJaggedTensor. TorchRec also accepts a TensorDict of jagged
    tensors."""
    if isinstance(features, KeyedJaggedTensor):
        return features
    return maybe_td_to_kjt(features, list(features.keys()))


def input_dist_has_extra_steps(collection: Any) -> bool:
    """Whether TorchRec's ``input_dist`` of bags does more with a batch than distributing it.

    Since 1.8 it optionally records features that a train pipeline may free early, and collects
    scores of features.
    """
    return getattr(collection, "_free_features_storage_early", False) or getattr(
        collection, "_enabled_feature_score_auto_collection", False
    )


def is_2d(env: ShardingEnv) -> bool:
    """Whether tables are replicated over groups of ranks, as in ``DMPCollection``."""
    return isinstance(env, ShardingEnv2D)


def replica_group(place: Any) -> dist.ProcessGroup:
    """The ranks that hold the same shards, from the argument of
    ``DMPCollection._allreduce_tensors``: a process group up to 1.7, a context with one from 1.8."""
    return place if isinstance(place, dist.ProcessGroup) else place.replica_pg
