"""The sharders to give to the planner and to DistributedModelParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import get_default_sharders as stock_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_hkv.sharding.embedding_bag import BackendEmbeddingBagCollection
from torchrec_hkv.sharding.optimizer import name_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.validation import planned_tables


class BackendEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards EmbeddingBagCollections that stock kernels and backends serve side by side."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, and row-wise on the CPU too, where it leaves it out."""
        types = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's, and the one that all backends share where tables are not replicated."""
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return kernels
        return [*kernels, KERNEL]

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
        planned = planned_tables(module, params, env, device, self.fused_params)
        for name in planned:
            name_optimizer(module.embedding_bags[name].weight)
        keywords: dict[str, Any] = {
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
            "sharded_module_order_overwrite": self._sharded_module_order_overwrite,
        }
        return BackendEmbeddingBagCollection(**keywords, planned=planned)

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """What :meth:`shard` makes."""
        return BackendEmbeddingBagCollection


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, where EmbeddingBagCollections may have tables on backends."""
    ours = BackendEmbeddingBagCollectionSharder()
    return [
        ours if sharder.module_type is ours.module_type else sharder
        for sharder in stock_default_sharders()
    ]
