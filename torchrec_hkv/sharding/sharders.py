"""The sharders to give to the planner and to DistributedModelParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import get_default_sharders as stock_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_hkv.sharding.embedding import BackendEmbeddingCollection
from torchrec_hkv.sharding.embedding_bag import BackendEmbeddingBagCollection
from torchrec_hkv.sharding.embedding_sharding import POOLED_SHARDINGS
from torchrec_hkv.sharding.optimizer import name_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.tables import Collection, table_weight
from torchrec_hkv.sharding.validation import planned_tables


class _BackendSharder:
    """What both sharders share; a mixin before TorchRec's."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's, and the one that all backends share."""
        return [*super().compute_kernels(sharding_type, compute_device_type), KERNEL]

    def _shard_arguments(
        self,
        module: Collection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> dict[str, Any]:
        """The arguments that both sharded collections take, checked."""
        planned = planned_tables(module, params, env, device, self.fused_params)
        for name in planned:
            name_optimizer(table_weight(module, name))
        return {
            "module": module,
            "table_name_to_parameter_sharding": {
                **params,
                **{name: table.sharding for name, table in planned.items()},
            },
            "env": env,
            "fused_params": self.fused_params,
            "device": device,
            "qcomm_codecs_registry": self.qcomm_codecs_registry,
            "module_fqn": module_fqn,
            "planned": planned,
        }


class BackendEmbeddingBagCollectionSharder(_BackendSharder, EmbeddingBagCollectionSharder):
    """Shards EmbeddingBagCollections that stock kernels and backends serve side by side."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, and on the CPU those by rows too, where it leaves them out."""
        types = super().sharding_types(compute_device_type)
        return [*types, *self.added_sharding_types(compute_device_type)]

    def added_sharding_types(self, compute_device_type: str) -> list[str]:
        """Those that TorchRec's sharder does not offer. Over gloo they fail on uneven batches."""
        types = super().sharding_types(compute_device_type)
        return [served for served in POOLED_SHARDINGS if served not in types]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Makes this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: where the tables will live.
            module_fqn: where the module is in the model.

        Raises:
            ValueError: a table that its backend can't serve as planned.
        """
        return BackendEmbeddingBagCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """What :meth:`shard` makes."""
        return BackendEmbeddingBagCollection


class BackendEmbeddingCollectionSharder(_BackendSharder, EmbeddingCollectionSharder):
    """Shards EmbeddingCollections that stock kernels and backends serve side by side."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Makes this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: where the tables will live.
            module_fqn: where the module is in the model.

        Raises:
            ValueError: a table that its backend can't serve as planned.
        """
        return BackendEmbeddingCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            use_index_dedup=self._use_index_dedup,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        """What :meth:`shard` makes."""
        return BackendEmbeddingCollection


#: The sharders of modules whose tables backends may serve.
BACKEND_SHARDERS = (BackendEmbeddingBagCollectionSharder, BackendEmbeddingCollectionSharder)


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, where collections may have tables on backends."""
    ours = {sharder.module_type: sharder for sharder in (make() for make in BACKEND_SHARDERS)}
    return [ours.get(sharder.module_type, sharder) for sharder in stock_default_sharders()]
