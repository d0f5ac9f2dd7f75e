"""The arguments of a sharded collection, to create it again under another plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_hkv.sharding.tables import Collection, table_configs, table_weight


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arguments with which a collection was sharded, without the plan.

    Attributes:
        sharder: the sharder that created the collection.
        module: the unsharded collection, without values.
        env: the ranks.
        device: device of the tables.
        path: path of the collection in the model.
    """

    sharder: ModuleSharder[nn.Module]
    module: Collection
    env: ShardingEnv
    device: torch.device | None
    path: str | None

    @classmethod
    def of(
        cls,
        sharder: ModuleSharder[nn.Module],
        module: Collection,
        env: ShardingEnv,
        device: torch.device | None,
        path: str | None,
    ) -> Recipe:
        """The recipe of a collection that will be sharded. It does not store values of weights."""
        return cls(sharder, _without_values(module), env, device, path)

    def make(self, plan: Mapping[str, ParameterSharding]) -> nn.Module:
        """Creates the collection under another plan, with new tables; a collective call."""
        return self.sharder.shard(self.module, dict(plan), self.env, self.device, self.path)


def _without_values(module: Collection) -> Collection:
    configs, device = list(table_configs(module).values()), torch.device("meta")
    if isinstance(module, EmbeddingCollection):
        copy: Collection = EmbeddingCollection(
            configs, device=device, need_indices=module.need_indices()
        )
    else:
        copy = type(module)(configs, is_weighted=module.is_weighted(), device=device)
    for config in configs:
        # Attributes that apply_optimizer_in_backward has set on the weight.
        applied = vars(table_weight(module, config.name))
        for name, value in applied.items():
            setattr(table_weight(copy, config.name), name, value)
    return copy
