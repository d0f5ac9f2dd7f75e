"""TorchRec's shardings of pooled tables, with lookups and an input distribution that know ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.input_dist import RowWiseFeaturesDist
from torchrec_hkv.sharding.kernel import BackendEmbeddingBag
from torchrec_hkv.sharding.parameter_sharding import tag_of


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup of all groups of one sharding, stock and ours.

    Its ``prefetch`` goes by a list of kernels that ours is not in: a group of ours is found in its
    forward, prefetched or not.
    """

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return BackendEmbeddingBag(config, pg, device, sharding_type)
        return super()._create_embedding_kernel(config, device, pg, sharding_type, env)


def _is_hashed(table: ShardedEmbeddingTable) -> bool:
    tag = tag_of(table)
    return tag is not None and registry.get(tag.backend).routing == "hashed"


class RowWiseSharding(RwPooledEmbeddingSharding):
    """Row-wise: stock tables and ours share one all-to-all."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The distribution of ids to the ranks that own them."""
        return RowWiseFeaturesDist(
            pg=self._pg,
            feature_hash_sizes=self._get_feature_hash_sizes(),
            feature_is_hashed=[
                _is_hashed(table)
                for group in self._grouped_embedding_configs
                for table in group.embedding_tables
                for _ in range(table.num_features())
            ],
            device=device if device is not None else self._device,
        )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """The lookup of this rank's tables."""
        return PooledLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            sharding_type=ShardingType.ROW_WISE,
            env=self._env,
        )


class TableWiseSharding(TwPooledEmbeddingSharding):
    """Table-wise."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """The lookup of this rank's tables."""
        return PooledLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            env=self._env,
        )


#: What serves tables of ours, by TorchRec's sharding type.
SHARDINGS: dict[str, type[RowWiseSharding] | type[TableWiseSharding]] = {
    ShardingType.ROW_WISE.value: RowWiseSharding,
    ShardingType.TABLE_WISE.value: TableWiseSharding,
}
