"""TorchRec's lookups of all groups of a sharding, with kernels for tables on backends.

The ``prefetch`` of these lookups skips the kernels of backends, which find ids in their forward,
with or without prefetching.
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
    """Makes ranks without tables send the right dtype; TorchRec's lookups always send float32 from
    them. A mixin before TorchRec's lookups."""

    def __init__(self, *args: Any, output_dtype: torch.dtype, **kwargs: Any) -> None:
        """
        Args:
            args: arguments of TorchRec's class.
            output_dtype: dtype of the outputs of all ranks.
            kwargs: keyword arguments of TorchRec's class.
        """
        super().__init__(*args, **kwargs)
        self._dummy_embs_tensor = torch.empty_like(
            self._dummy_embs_tensor, dtype=output_dtype, requires_grad=True
        )


class _RefusesStateTracking:
    """Refuses trackers of optimizer states, because they can't read the states of backends. A mixin
    before TorchRec's lookups."""

    def register_optim_state_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Called by TorchRec's ``ModelDeltaTracker`` in the modes that track optimizer states.

        Args:
            record_fn: a function to call after each lookup of a kernel, to read its states.

        Raises:
            ValueError: the lookup has tables on a backend.
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


class BackendPooledLookup(_AnyDtype, _RefusesStateTracking, GroupedPooledEmbeddingsLookup):
    """Lookup for pooled tables."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Looks up the features of all groups.

        Args:
            sparse_features: the ids that this rank has received.

        Returns:
            The outputs of the groups side by side.
        """
        if len(self._emb_modules) != 1:
            return super().forward(sparse_features)
        # TorchRec splits the batch by group, which needs the number of ids of each feature and thus
        # synchronizes with the device. With one group no split is needed.
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
        # FBGEMM's lookups write into a shared output tensor, which backends do not support.
        return merged_groups(
            self._forward(features_by_group),
            self._vbe_splits(features_by_group),
            self._feature_splits,
        )


class BackendSequenceLookup(_AnyDtype, _RefusesStateTracking, GroupedEmbeddingsLookup):
    """Lookup for sequence tables."""

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
    """Overrides how TorchRec's shardings create their lookup; a mixin before them."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        """Creates the lookup of this rank's tables."""
        return self.make_lookup(device if device is not None else self._device, feature_processor)

    def make_lookup(
        self, device: torch.device, feature_processor: BaseGroupedFeatureProcessor | None
    ) -> BaseEmbeddingLookup:
        """Creates the lookup on a given device."""
        raise NotImplementedError
