"""The sharded EmbeddingBagCollection with tables on backends."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_hkv.compat import input_dist_has_extra_steps, to_keyed_jagged_tensor
from torchrec_hkv.sharding.dists.awaitables import BatchAwaitable
from torchrec_hkv.sharding.dists.exchange_groups import codecs_of, needs_backend_sharding
from torchrec_hkv.sharding.dists.features import check_row_numbers, in_order, prepare_features
from torchrec_hkv.sharding.dists.means import Means, divide
from torchrec_hkv.sharding.dists.streams import (
    BagContext,
    follow_exchange,
    follow_lookup,
    note_exchange,
)
from torchrec_hkv.sharding.modules.collection import BackendCollection
from torchrec_hkv.sharding.modules.embedding_sharding import POOLED_SHARDINGS
from torchrec_hkv.sharding.modules.multi_part_lookup import MultiPartLookup
from torchrec_hkv.sharding.validation import PlannedTable

# Sharding types whose column shards arrive in the order of ranks and are permuted to the order of
# columns.
_PERMUTED = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


class BackendEmbeddingBagCollection(BackendCollection, ShardedEmbeddingBagCollection):
    """TorchRec's ShardedEmbeddingBagCollection, extended for tables on backends."""

    tables_attribute = "embedding_bags"
    configs_attribute = "_embedding_bag_configs"
    multi_part_types = (ShardingType.ROW_WISE.value,)
    #: Whether feature processors compute the weights of ids after the input distribution.
    has_feature_processors = False

    def __init__(self, *args: Any, planned: dict[str, PlannedTable], **kwargs: Any) -> None:
        """
        Args:
            args: arguments of TorchRec's class.
            planned: the tables on backends by name, already checked.
            kwargs: keyword arguments of TorchRec's class.
        """
        super().__init__(*args, planned=planned, **kwargs)
        self._means = Means(
            self._embedding_bag_configs,
            {name: sharding.sharding_type for name, sharding in self.module_sharding_plan.items()},
        )
        # TorchRec's mean division is wrong for tables with several sharding types (see Means).
        self._has_mean_pooling_callback = False

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
        """Overrides TorchRec's hook: the sharding for all tables of one sharding type."""
        qcomm_codecs_registry = codecs_of(sharding_infos, qcomm_codecs_registry)
        if not needs_backend_sharding(sharding_infos):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        keywords: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}
        if sharding_type in _PERMUTED:
            keywords["permute_embeddings"] = permute_embeddings
        return POOLED_SHARDINGS[sharding_type](sharding_infos, env, device, **keywords)

    def create_context(self) -> BagContext:
        """The context that a batch carries from its input distribution to its outputs."""
        return BagContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the input distribution of a batch.

        Args:
            ctx: context of the batch.
            features: ids of any integer dtype. They are converted to int64, so that all ranks send
                the same dtype.

        Raises:
            ValueError: ids are not integers; weights, scores or a feature are missing; or batch
                sizes differ between features without inverse indices. Nothing has been sent then.
        """
        features = to_keyed_jagged_tensor(features)
        if self._planned:
            weights_follow = self.has_feature_processors and features.weights_or_none() is None
            features = prepare_features(
                features,
                self._embedding_bag_configs,
                is_weighted=self._is_weighted and not weights_follow,
                score_wire=self._score_wire,
                is_training=self.training,
            )
            check_row_numbers(features, self._row_numbers)
        self._check_unique(features)
        note_exchange(ctx, self._device)
        if (
            self._has_uninitialized_input_dist
            or features.variable_stride_per_key()
            or input_dist_has_extra_steps(self)
        ):
            # For the first batch TorchRec warns of ids beyond num_embeddings, but tables on
            # backends take any id.
            with self._without_our_configs():
                begun = super().input_dist(ctx, features)
        else:
            with torch.no_grad():
                begun = self._begin(ctx, features)
        if self._means:
            with torch.no_grad():
                names, dims = self._embedding_names, self._dim_per_key
                ctx.divisor = self._means.divisor(features, names, dims, sum(self._embedding_dims))
        return begun

    def _begin(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the input distribution of a batch with equal batch sizes, after the first one.
        Does the same as TorchRec's ``input_dist``, but does not synchronize with the device if
        there is one sharding: TorchRec splits the features by sharding, which needs the number of
        ids of each feature."""
        if self._has_features_permute:
            features = in_order(features, self._features_order, self._features_order_tensor)
        parts = [features]
        if len(self._input_dists) > 1:
            parts = features.split(self._feature_splits)
        exchanges = [
            exchange(part) for exchange, part in zip(self._input_dists, parts, strict=True)
        ]
        ctx.sharding_contexts.extend(
            EmbeddingShardingContext(batch_size_per_feature_pre_a2a=part.stride_per_key())
            for part in parts
        )
        return BatchAwaitable(exchanges, ctx)

    def compute(
        self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList
    ) -> list[torch.Tensor]:
        """Looks up the batch; lookups in parts also start their output distribution."""
        self._expect(ctx)
        return super().compute(ctx, dist_input)

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Starts the output distribution, and divides row-wise means."""
        return self._with_means(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Looks up the batch, starts the output distribution, and divides row-wise means."""
        self._expect(ctx)
        stream = follow_exchange(ctx, input, self._device)
        outputs = self._with_means(ctx, super().compute_and_output_dist(ctx, input))
        follow_lookup(outputs, stream)
        return outputs

    def _expect(self, ctx: EmbeddingBagCollectionContext) -> None:
        """Passes the context of the batch to lookups that send their own outputs."""
        for lookup, context in zip(self._lookups, ctx.sharding_contexts, strict=True):
            if isinstance(lookup, MultiPartLookup):
                lookup.expect(context)

    def _with_means(
        self, ctx: EmbeddingBagCollectionContext, outputs: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        if self._means:
            # The first callback, so that callbacks that order streams get the final outputs.
            outputs.callbacks.insert(0, functools.partial(divide, divisor=ctx.divisor))
        return outputs

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """TorchRec's dynamic resharding, for stock tables only.

        Raises:
            ValueError: the collection has tables on backends.
        """
        if self._planned:
            raise ValueError(
                f"Tables {sorted(self._planned)} are served by backends and can't be resharded "
                "by update_shards: use torchrec_hkv.checkpoint.reshard."
            )
        super().update_shards(changed_sharding_params, env, device)

    @staticmethod
    def _pre_load_state_dict_hook(
        self: BackendEmbeddingBagCollection,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # nn.Module passes (local_metadata, strict, missing_keys, unexpected_keys, error_msgs).
        self._load_tables(state_dict, prefix, args[2] if len(args) > 2 else [])
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)
