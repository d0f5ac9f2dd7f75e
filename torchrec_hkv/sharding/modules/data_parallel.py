"""Data-parallel sharding: every rank holds the tables, and their backend keeps replicas equal.

TorchRec wraps the lookup of data-parallel tables in DistributedDataParallel, for the parameters of
stock tables. Tables on backends have no parameters and are updated in their backward. A collection
with tables on backends only is therefore not wrapped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.sharding.dp_sequence_sharding import (
    DpSequenceEmbeddingDist,
    DpSequenceEmbeddingSharding,
)
from torchrec.distributed.sharding.dp_sharding import (
    BaseDpEmbeddingSharding,
    DpPooledEmbeddingDist,
    DpPooledEmbeddingSharding,
    DpSparseFeaturesDist,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.kernels.kernel import BackendKernel
from torchrec_hkv.sharding.kernels.lookups import (
    BackendPooledLookup,
    BackendSequenceLookup,
    MakesLookup,
)
from torchrec_hkv.sharding.kernels.output_dtype import output_dtype_of_ranks
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding


class _ReplicatedLookup:
    """Makes tables on backends replicas of those on other ranks; a mixin before the lookups."""

    @property
    def module(self) -> _ReplicatedLookup:
        """This lookup itself, because TorchRec unwraps lookups that it expects to be wrapped."""
        return self

    def _replicate(self, kernel: BaseEmbedding, pg: dist.ProcessGroup | None) -> BaseEmbedding:
        if isinstance(kernel, BackendKernel):
            kernel.emb_module.replicate(pg)
        return kernel

    def hide_placeholders_from_ddp(self) -> None:
        """Hides the placeholders of tables on backends from DistributedDataParallel."""
        names = [
            name
            for path, module in self.named_modules()
            if isinstance(module, BackendKernel)
            for table, _ in module.named_parameters()
            # Each placeholder is a parameter of a submodule and of the lookup itself.
            for name in (f"{path}.{table}", table)
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


class ReplicatedPooledLookup(_ReplicatedLookup, BackendPooledLookup):
    """Lookup for data-parallel pooled tables."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *args: Any,
    ) -> BaseEmbedding:
        return self._replicate(super()._create_embedding_kernel(config, device, pg, *args), pg)


class ReplicatedSequenceLookup(_ReplicatedLookup, BackendSequenceLookup):
    """Lookup for data-parallel sequence tables."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        *args: Any,
    ) -> BaseEmbedding:
        return self._replicate(super()._create_embedding_kernel(config, pg, *args), pg)


class _DataParallelPooled(MakesLookup):
    """Creates the lookup for pooled tables; a mixin before TorchRec's base class."""

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        lookup = ReplicatedPooledLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device,
            feature_processor=feature_processor,
            # As in TorchRec: weight gradients are only scaled if tables are on other ranks.
            scale_weight_gradients=False,
            env=self._env,
            output_dtype=output_dtype_of_ranks([self._grouped_embedding_configs]),
        )
        lookup.hide_placeholders_from_ddp()
        return lookup


class _DataParallelSequence(MakesLookup):
    """Creates the lookup for sequence tables; a mixin before TorchRec's base class."""

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        lookup = ReplicatedSequenceLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device,
            env=self._env,
            output_dtype=output_dtype_of_ranks([self._grouped_embedding_configs]),
        )
        lookup.hide_placeholders_from_ddp()
        return lookup


class _LocalDists:
    """Distributions for tables that every rank holds; a mixin before TorchRec's base class."""

    output_dist_type: type[BaseEmbeddingDist]

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The input distribution; ids stay on their rank."""
        return DpSparseFeaturesDist()

    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist:
        """The output distribution; rows stay on their rank."""
        return self.output_dist_type()


class BackendDpPooledSharding(_DataParallelPooled, _LocalDists, BaseDpEmbeddingSharding):
    """Data-parallel pooled tables, all on backends. It is not a DpPooledEmbeddingSharding, because
    TorchRec would wrap that."""

    output_dist_type = DpPooledEmbeddingDist


class MixedDpPooledSharding(_DataParallelPooled, DpPooledEmbeddingSharding):
    """Data-parallel pooled tables, stock and on backends."""


class BackendDpSequenceSharding(_DataParallelSequence, _LocalDists, BaseDpEmbeddingSharding):
    """Data-parallel sequence tables, all on backends. It is not a DpSequenceEmbeddingSharding,
    because TorchRec would wrap that."""

    output_dist_type = DpSequenceEmbeddingDist


class MixedDpSequenceSharding(_DataParallelSequence, DpSequenceEmbeddingSharding):
    """Data-parallel sequence tables, stock and on backends."""


def data_parallel_pooled(
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    **_not_sent: Any,
) -> EmbeddingSharding:
    """The data-parallel sharding for pooled tables.

    Args:
        sharding_infos: TorchRec's infos of the tables.
        env: the ranks.
        device: device of the tables.
        _not_sent: further arguments of other shardings, which exchange rows; ignored.
    """
    return (BackendDpPooledSharding if _all_on_backends(sharding_infos) else MixedDpPooledSharding)(
        sharding_infos, env, device
    )


def data_parallel_sequence(
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    **_not_sent: Any,
) -> EmbeddingSharding:
    """The data-parallel sharding for sequence tables; see :func:`data_parallel_pooled`."""
    make = (
        BackendDpSequenceSharding if _all_on_backends(sharding_infos) else MixedDpSequenceSharding
    )
    return make(sharding_infos, env, device)


def _all_on_backends(sharding_infos: list[EmbeddingShardingInfo]) -> bool:
    return all(isinstance(info.param_sharding, BackendParameterSharding) for info in sharding_infos)
