"""TorchRec's lookups of all groups of one sharding, where backends serve some of the groups.

Their ``prefetch`` goes by a list of kernels that ours is not in: a group of ours is found in its
forward, prefetched or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.variable_batch import merged_groups
from torchrec_hkv.sharding.kernels.kernel import (
    BackendEmbedding,
    BackendEmbeddingBag,
    BackendKernel,
)


class _AnyDtype:
    """A mixin before TorchRec's lookups: a rank without tables sends nothing in float32 there,
    whatever the others send."""

    def __init__(self, *args: Any, output_dtype: torch.dtype, **kwargs: Any) -> None:
        """
        Args:
            args: TorchRec's.
            output_dtype: of the outputs of all ranks.
            kwargs: TorchRec's.
        """
        super().__init__(*args, **kwargs)
        self._dummy_embs_tensor = torch.empty_like(
            self._dummy_embs_tensor, dtype=output_dtype, requires_grad=True
        )


class _RefusesStateTracking:
    """A mixin before TorchRec's lookups: no tracker of optimizer states can read ours."""

    def register_optim_state_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """As TorchRec's ``ModelDeltaTracker`` calls it in the modes that track momentum.

        Args:
            record_fn: called after each lookup of a kernel, whose optimizer state it reads.

        Raises:
            ValueError: the lookup has tables of a backend.
        """
        for kernel in self._emb_modules:
            if isinstance(kernel, BackendKernel):
                tables = ", ".join(repr(shard.name) for shard in kernel.shards)
                raise ValueError(
                    "ModelDeltaTracker was asked to track optimizer states (MOMENTUM_LAST, "
                    f"MOMENTUM_DIFF or ROWWISE_ADAGRAD), but those of {tables} belong to a backend "
                    "and can't be tracked: use TrackingMode.ID_ONLY, or name the collection in "
                    "fqns_to_skip."
                )
        super().register_optim_state_tracker_fn(record_fn)


class PooledLookup(_AnyDtype, _RefusesStateTracking, GroupedPooledEmbeddingsLookup):
    """Lookup for pooled tables."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Looks up the features of all groups.

        Args:
            sparse_features: the ids that have come to this rank.

        Returns:
            The outputs of the groups side by side.
        """
        if len(self._emb_modules) != 1:
            return super().forward(sparse_features)
        # TorchRec's splits the batch by group, for which it asks the device how many ids each
        # feature has.
        (pooled,) = self._forward([sparse_features])
        return pooled

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

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> torch.Tensor:
        # FBGEMM's lookups write into one output, each into the one that it was given; ours can't
        # take part in that.
        return merged_groups(
            self._forward(features_by_group),
            self._vbe_splits(features_by_group),
            self._feature_splits,
        )


class SequenceLookup(_AnyDtype, _RefusesStateTracking, GroupedEmbeddingsLookup):
    """Lookup for tables of sequences."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        if config.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return BackendEmbedding(config, pg, device)
        return super()._create_embedding_kernel(config, pg, device, env)


class MakesLookup:
    """How TorchRec asks a sharding for its lookup; a mixin before TorchRec's shardings."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """The lookup of this rank's tables."""
        return self.make_lookup(device if device is not None else self._device, feature_processor)

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        """The same, on a device that is known."""
        raise NotImplementedError
