"""The sharded EmbeddingCollection with tables on backends."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingShardingInfo,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_hkv.compat import to_keyed_jagged_tensor
from torchrec_hkv.sharding.dists.exchange_groups import codecs_of, needs_backend_sharding
from torchrec_hkv.sharding.dists.features import check_row_numbers, prepare_features
from torchrec_hkv.sharding.dists.index_dedup import deduplicate
from torchrec_hkv.sharding.dists.streams import (
    SequenceContext,
    follow_exchange,
    follow_lookup,
    note_exchange,
)
from torchrec_hkv.sharding.modules.collection import BackendCollection
from torchrec_hkv.sharding.modules.embedding_sharding import SEQUENCE_SHARDINGS


class BackendEmbeddingCollection(BackendCollection, ShardedEmbeddingCollection):
    """TorchRec's ShardedEmbeddingCollection, extended for tables on backends."""

    tables_attribute = "embeddings"
    configs_attribute = "_embedding_configs"
    unsplit_types = (ShardingType.COLUMN_WISE.value,)

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[SequenceShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
        """Overrides TorchRec's hook: the sharding for all tables of one sharding type."""
        qcomm_codecs_registry = codecs_of(sharding_infos, qcomm_codecs_registry)
        sharding_type = sharding_type.partition("/")[0]  # without the number of the group
        if not needs_backend_sharding(sharding_infos):
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return SEQUENCE_SHARDINGS[sharding_type](
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def create_context(self) -> SequenceContext:
        """The context that a batch carries from its input distribution to its outputs."""
        return SequenceContext(sharding_contexts=[])

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the input distribution of a batch.

        Args:
            ctx: context of the batch.
            features: ids of any integer dtype. They are converted to int64, so that all ranks send
                the same dtype.

        Raises:
            ValueError: ids are not integers, or a feature is missing. Nothing has been sent then.
        """
        if self._planned:
            features = to_keyed_jagged_tensor(features)
            wire = self._score_wire if self.training else None
            if wire is not None and features.variable_stride_per_key():
                raise ValueError(
                    f"Tables {[table.name for table in wire.tables]} take scores, but the batch "
                    "has a separate batch size for each feature, for which TorchRec's "
                    "EmbeddingCollection sends only ids: give all features the same batch size."
                )
            features = prepare_features(
                features,
                self._embedding_configs,
                is_weighted=False,
                score_wire=self._score_wire,
                is_training=self.training,
            )
            check_row_numbers(features, self._row_numbers)
        self._check_unique(features)
        note_exchange(ctx, self._device)
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Looks up the batch and starts its output distribution."""
        stream = follow_exchange(ctx, input, self._device)
        outputs = super().compute_and_output_dist(ctx, input)
        follow_lookup(outputs, stream)
        return outputs

    def _dedup_indices(
        self,
        ctx: EmbeddingCollectionContext,
        input_feature_splits: list[KeyedJaggedTensor],
    ) -> list[KeyedJaggedTensor]:
        # TorchRec combines table and id in one number, which limits ids to num_embeddings.
        if not self._planned:
            return super()._dedup_indices(ctx, input_feature_splits)
        distinct: list[KeyedJaggedTensor] = []
        for features, sharding in zip(
            input_feature_splits, self._sharding_type_to_sharding.values(), strict=True
        ):
            tables = sharding.embedding_tables()
            reduced, positions = deduplicate(
                features,
                [table.num_features() for table in tables],
                [self._uniqueness.has_unique(table.name) for table in tables],
            )
            ctx.input_features.append(features)
            ctx.reverse_indices.append(positions)
            distinct.append(reduced)
        return distinct

    @staticmethod
    def _pre_load_state_dict_hook(
        self: BackendEmbeddingCollection,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # nn.Module passes (local_metadata, strict, missing_keys, unexpected_keys, error_msgs).
        self._load_tables(state_dict, prefix, args[2] if len(args) > 2 else [])
        ShardedEmbeddingCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)
