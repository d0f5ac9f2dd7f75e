"""TorchRec's shardings with lookups and distributions that support tables on backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends import registry
from torchrec_hkv.sharding.dists.exchange_groups import Codecs, ExchangeGroup
from torchrec_hkv.sharding.dists.input_dist import (
    RowWiseFeaturesDist,
    TableRowWiseFeaturesDist,
    TableWiseFeaturesDist,
)
from torchrec_hkv.sharding.dists.output_dist import RowWiseOutputDist, TableWiseOutputDist
from torchrec_hkv.sharding.kernels.lookups import (
    BackendPooledLookup,
    BackendSequenceLookup,
    MakesLookup,
)
from torchrec_hkv.sharding.kernels.output_dtype import output_dtype_of_ranks
from torchrec_hkv.sharding.modules.data_parallel import data_parallel_pooled, data_parallel_sequence
from torchrec_hkv.sharding.modules.multi_part_lookup import (
    MultiPartLookup,
    MultiPartOutputDist,
    groups_of_parts,
)
from torchrec_hkv.sharding.parameter_sharding import tag_of


class _Pooled(MakesLookup):
    """Creates the lookup for pooled tables; a mixin before TorchRec's shardings."""

    #: Sharding type to pass to the lookup if it must sum instead of average, because TorchRec
    #: divides the sum over ranks later.
    summed_as: ClassVar[ShardingType | None] = None

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        return self._lookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device,
            feature_processor=feature_processor,
            sharding_type=self.summed_as,
            env=self._env,
            output_dtype=output_dtype_of_ranks(self._grouped_embedding_configs_per_rank),
        )

    def _lookup(self, **arguments: Any) -> BackendPooledLookup:
        return BackendPooledLookup(**arguments)


class _Sequence(MakesLookup):
    """Creates the lookup for sequence tables; a mixin before TorchRec's shardings."""

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        return BackendSequenceLookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device,
            env=self._env,
            output_dtype=output_dtype_of_ranks(self._grouped_embedding_configs_per_rank),
        )


def feature_is_hashed(groups: Iterable[GroupedEmbeddingConfig]) -> list[bool]:
    """For each feature of groups of tables, whether its ids are mapped to ranks by hash."""
    return [
        (tag := tag_of(table)) is not None and registry.get(tag.backend).routes_by_hash(tag.options)
        for group in groups
        for table in group.embedding_tables
        for _ in range(table.num_features())
    ]


class _RowWise:
    """Input distribution for row-wise sharding, with one all-to-all for stock tables and tables on
    backends; a mixin before TorchRec's shardings."""

    is_sequence: ClassVar[bool] = False

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The distribution of ids to the ranks that own them."""
        return RowWiseFeaturesDist(
            pg=self._pg,
            feature_hash_sizes=self._get_feature_hash_sizes(),
            feature_is_hashed=feature_is_hashed(self._grouped_embedding_configs),
            is_sequence=self.is_sequence,
            needs_counts=self.is_sequence or len(self._grouped_embedding_configs) > 1,
            device=device if device is not None else self._device,
        )


class _RowWiseOnHosts:
    """Input distribution for tables whose rows are sharded over the ranks of one host; a mixin
    before TorchRec's shardings."""

    summed_as = ShardingType.TABLE_ROW_WISE

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The distribution of ids to the ranks that own them."""
        return TableRowWiseFeaturesDist(
            pg=self._pg,
            local_size=self._intra_pg.size(),
            features_per_rank=self._features_per_rank(self._grouped_embedding_configs_per_rank),
            feature_hash_sizes=self._get_feature_hash_sizes(),
            feature_is_hashed=feature_is_hashed(
                itertools.chain.from_iterable(self._grouped_embedding_configs_per_node)
            ),
            device=device if device is not None else self._device,
            needs_counts=len(self._grouped_embedding_configs_per_rank[self._rank]) > 1,
        )


class _TableWise:
    """Input distribution for whole tables or columns; a mixin before TorchRec's shardings."""

    is_sequence: ClassVar[bool] = False

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The distribution of ids to the ranks that hold the tables."""
        return TableWiseFeaturesDist(
            self._pg,
            self.features_per_rank(),
            device if device is not None else self._device,
            needs_counts=(
                self.is_sequence or len(self._grouped_embedding_configs_per_rank[self._rank]) > 1
            ),
        )


class _TableWisePooled(_TableWise, _Pooled):
    """Distributions for pooled whole tables or columns; a mixin before TorchRec's shardings."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]:
        """The output distribution of pooled rows."""
        return TableWiseOutputDist(super().create_output_dist(device))


class RowWisePooled(_RowWise, _Pooled, RwPooledEmbeddingSharding):
    """Row-wise sharding of pooled tables, in parts if the exchange group has parts."""

    summed_as = ShardingType.ROW_WISE

    def __init__(self, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kw: Any) -> None:
        """
        Args:
            sharding_infos: TorchRec's infos of the tables.
            args: further arguments of TorchRec's class.
            kw: keyword arguments of TorchRec's class.
        """
        super().__init__(sharding_infos, *args, **kw)
        self._parts = sharding_infos.parts if isinstance(sharding_infos, ExchangeGroup) else ()
        self._dists: list[RowWiseOutputDist] = []
        if self._parts:
            of_ranks = [
                groups_of_parts(groups, self._parts)
                for groups in self._grouped_embedding_configs_per_rank
            ]
            self._grouped_embedding_configs_per_rank = [
                list(itertools.chain.from_iterable(of_parts)) for of_parts in of_ranks
            ]
            self._grouped_embedding_configs = self._grouped_embedding_configs_per_rank[self._rank]
            self._num_groups = [len(groups) for groups in of_ranks[self._rank]]
            self._dists = [
                self._dist(groups, part.codecs)
                for groups, part in zip(of_ranks[self._rank], self._parts, strict=True)
            ]

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]:
        """The output distribution of pooled rows."""
        if self._parts:
            return MultiPartOutputDist(self._dists)
        return self._dist(self._grouped_embedding_configs, None)

    def _dist(
        self, groups: list[GroupedEmbeddingConfig], codecs: Codecs | None
    ) -> RowWiseOutputDist:
        return RowWiseOutputDist(
            self._pg,
            qcomm_codecs_registry=self.qcomm_codecs_registry if codecs is None else codecs,
            embedding_dims=[dim for group in groups for dim in group.embedding_dims()],
        )

    def _lookup(self, **arguments: Any) -> BackendPooledLookup:
        if not self._parts:
            return super()._lookup(**arguments)
        return MultiPartLookup(parts=self._num_groups, dists=self._dists, **arguments)


class TableWisePooled(_TableWisePooled, TwPooledEmbeddingSharding):
    """Table-wise sharding of pooled tables."""


class ColumnWisePooled(_TableWisePooled, CwPooledEmbeddingSharding):
    """Column-wise sharding of pooled tables. Every column shard sees all ids and thus holds the
    same ids."""


class TableColumnWisePooled(_TableWisePooled, TwCwPooledEmbeddingSharding):
    """Column-wise sharding of pooled tables over the ranks of one host."""


class TableRowWisePooled(_RowWiseOnHosts, _Pooled, TwRwPooledEmbeddingSharding):
    """Row-wise sharding of pooled tables over the ranks of one host."""


class GridPooled(_RowWiseOnHosts, _Pooled, GridPooledEmbeddingSharding):
    """Sharding of pooled tables column-wise over hosts and row-wise over the ranks of each."""


class RowWiseSequence(_RowWise, _Sequence, RwSequenceEmbeddingSharding):
    """Row-wise sharding of sequence tables."""

    is_sequence = True


class TableWiseSequence(_TableWise, _Sequence, TwSequenceEmbeddingSharding):
    """Table-wise sharding of sequence tables."""

    is_sequence = True


class ColumnWiseSequence(_TableWise, _Sequence, CwSequenceEmbeddingSharding):
    """Column-wise sharding of sequence tables."""

    is_sequence = True


#: Shardings for pooled tables on backends, by TorchRec's sharding type.
POOLED_SHARDINGS: dict[str, Callable[..., EmbeddingSharding]] = {
    ShardingType.ROW_WISE.value: RowWisePooled,
    ShardingType.TABLE_WISE.value: TableWisePooled,
    ShardingType.COLUMN_WISE.value: ColumnWisePooled,
    ShardingType.TABLE_COLUMN_WISE.value: TableColumnWisePooled,
    ShardingType.TABLE_ROW_WISE.value: TableRowWisePooled,
    ShardingType.GRID_SHARD.value: GridPooled,
    ShardingType.DATA_PARALLEL.value: data_parallel_pooled,
}

#: Shardings for sequence tables on backends, by those sharding types that TorchRec supports.
SEQUENCE_SHARDINGS: dict[str, Callable[..., EmbeddingSharding]] = {
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
    ShardingType.DATA_PARALLEL.value: data_parallel_sequence,
}
