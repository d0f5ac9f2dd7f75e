"""Data-parallel sharding: every rank holds the tables, and their backend keeps them alike.

TorchRec wraps the lookup of data-parallel tables in DistributedDataParallel, which is for
parameters: those of stock tables. Ours train in their backward and have none; where a collection
has only ours, nothing is wrapped.
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
from torchrec_hkv.sharding.kernels.lookups import MakesLookup, PooledLookup, SequenceLookup
from torchrec_hkv.sharding.kernels.output_dtype import output_dtype_of_ranks
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding


class _ReplicatedLookup:
    """Tells our tables that other ranks hold them too; a mixin before our lookups."""

    @property
    def module(self) -> _ReplicatedLookup:
        """Itself: what TorchRec takes for wrapped, it unwraps."""
        return self

    def _replicate(self, kernel: BaseEmbedding, pg: dist.ProcessGroup | None) -> BaseEmbedding:
        if isinstance(kernel, BackendKernel):
            kernel.emb_module.replicate(pg)
        return kernel

    def leave_out_ours(self) -> None:
        """Hides the placeholders of our tables from DistributedDataParallel."""
        names = [
            name
            for path, module in self.named_modules()
            if isinstance(module, BackendKernel)
            for table, _ in module.named_parameters()
            # As a module's own parameter, and as a parameter of the whole lookup.
            for name in (f"{path}.{table}", table)
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)


class ReplicatedPooledLookup(_ReplicatedLookup, PooledLookup):
    """Of pooled tables."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *args: Any,
    ) -> BaseEmbedding:
        return self._replicate(super()._create_embedding_kernel(config, device, pg, *args), pg)


class ReplicatedSequenceLookup(_ReplicatedLookup, SequenceLookup):
    """Of tables of sequences."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        *args: Any,
    ) -> BaseEmbedding:
        return self._replicate(super()._create_embedding_kernel(config, pg, *args), pg)


class _Pooled(MakesLookup):
    """A mixin before TorchRec's base class."""

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        lookup = ReplicatedPooledLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device,
            feature_processor=feature_processor,
            # As TorchRec: gradients of weights are scaled where tables lie on other ranks.
            scale_weight_gradients=False,
            env=self._env,
            output_dtype=output_dtype_of_ranks([self._grouped_embedding_configs]),
        )
        lookup.leave_out_ours()
        return lookup


class _Sequence(MakesLookup):
    """A mixin before TorchRec's base class."""

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
        lookup.leave_out_ours()
        return lookup


class _NothingSent:
    """The distributions of tables that every rank holds; a mixin before TorchRec's base class."""

    output_dist_type: type[BaseEmbeddingDist]

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Ids stay on their rank."""
        return DpSparseFeaturesDist()

    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist:
        """So do rows."""
        return self.output_dist_type()


class OurPooled(_Pooled, _NothingSent, BaseDpEmbeddingSharding):
    """Pooled tables, all of ours: no DpPooledEmbeddingSharding, which TorchRec would wrap."""

    output_dist_type = DpPooledEmbeddingDist


class MixedPooled(_Pooled, DpPooledEmbeddingSharding):
    """Pooled tables, stock and ours."""


class OurSequence(_Sequence, _NothingSent, BaseDpEmbeddingSharding):
    """Tables of sequences, all of ours: no DpSequenceEmbeddingSharding, as above."""

    output_dist_type = DpSequenceEmbeddingDist


class MixedSequence(_Sequence, DpSequenceEmbeddingSharding):
    """Tables of sequences, stock and ours."""


def data_parallel_pooled(
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    **_not_sent: Any,
) -> EmbeddingSharding:
    """The sharding of pooled tables.

    Args:
        sharding_infos: of the tables.
        env: the ranks.
        device: of the tables.
        _not_sent: how other shardings exchange rows; here nothing is.
    """
    return (OurPooled if _all_ours(sharding_infos) else MixedPooled)(sharding_infos, env, device)


def data_parallel_sequence(
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    **_not_sent: Any,
) -> EmbeddingSharding:
    """As :func:`data_parallel_pooled`, of tables of sequences."""
    make = OurSequence if _all_ours(sharding_infos) else MixedSequence
    return make(sharding_infos, env, device)


def _all_ours(sharding_infos: list[EmbeddingShardingInfo]) -> bool:
    return all(isinstance(info.param_sharding, BackendParameterSharding) for info in sharding_infos)
