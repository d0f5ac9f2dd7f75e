"""TorchRec's shardings, with lookups and an input distribution that know tables of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist, EmbeddingSharding
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    ShardedEmbeddingTable,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.input_dist import RowWiseFeaturesDist
from torchrec_hkv.sharding.lookups import PooledLookup, SequenceLookup
from torchrec_hkv.sharding.parameter_sharding import tag_of


class _Pooled:
    """Shardings of pooled tables; a mixin before TorchRec's."""

    #: Given to the lookup where a mean arrives as a sum that TorchRec divides later.
    summed_as: ClassVar[ShardingType | None] = None

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """The lookup of this rank's tables."""
        return PooledLookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            sharding_type=self.summed_as,
            env=self._env,
        )


class _Sequence:
    """Shardings of tables of sequences; a mixin before TorchRec's."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """The lookup of this rank's tables."""
        return SequenceLookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


def _is_hashed(table: ShardedEmbeddingTable) -> bool:
    tag = tag_of(table)
    return tag is not None and registry.get(tag.backend).routing == "hashed"


class _RowWise:
    """Stock tables and ours share one all-to-all; a mixin before TorchRec's row-wise shardings."""

    is_sequence: ClassVar[bool] = False

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
            is_sequence=self.is_sequence,
            device=device if device is not None else self._device,
        )


class RowWisePooled(_RowWise, _Pooled, RwPooledEmbeddingSharding):
    """Row-wise, pooled."""

    summed_as = ShardingType.ROW_WISE


class TableWisePooled(_Pooled, TwPooledEmbeddingSharding):
    """Table-wise, pooled."""


class RowWiseSequence(_RowWise, _Sequence, RwSequenceEmbeddingSharding):
    """Row-wise, sequences."""

    is_sequence = True


class TableWiseSequence(_Sequence, TwSequenceEmbeddingSharding):
    """Table-wise, sequences."""


#: What serves pooled tables of ours, by TorchRec's sharding type.
POOLED_SHARDINGS: dict[str, type[EmbeddingSharding]] = {
    ShardingType.ROW_WISE.value: RowWisePooled,
    ShardingType.TABLE_WISE.value: TableWisePooled,
}

#: What serves our tables of sequences.
SEQUENCE_SHARDINGS: dict[str, type[EmbeddingSharding]] = {
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.TABLE_WISE.value: TableWiseSequence,
}
