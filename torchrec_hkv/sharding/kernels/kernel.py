"""The compute kernels that TorchRec calls: groups of tables on one backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from torch import nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup, TableShard
from torchrec_hkv.sharding.dists.uniqueness import check_ids
from torchrec_hkv.sharding.dists.variable_batch import rank_major
from torchrec_hkv.sharding.kernels.dense_optimizer import sharded_state
from torchrec_hkv.sharding.kernels.optimizer import initial_learning_rate, optimizer_spec
from torchrec_hkv.sharding.kernels.output_dtype import OUTPUT_DTYPE, output_dtype
from torchrec_hkv.sharding.kernels.placeholder import clip_notice, placeholder
from torchrec_hkv.sharding.kernels.row_optimizer import InBackwardOptimizer
from torchrec_hkv.sharding.parameter_sharding import TableTag, tag_of, without_tag
from torchrec_hkv.sharding.tables import table_shard

if TYPE_CHECKING:
    from torchrec_hkv.sharding.dists.scores import ScoreWire


class BackendKernel(FusedOptimizerModule):
    """Tables of one backend, data type and pooling on one rank.

    A mixin, to be placed before TorchRec's base class of kernels, which reads the group's config.
    """

    #: How scores are sent with batches; None if no table of the collection takes scores.
    score_wire: ScoreWire | None = None

    def _create(self, device: torch.device | None, pooling: PoolingType) -> None:
        """Creates the tables, after TorchRec's base class has read the config.

        Args:
            device: device of the tables; None for the CPU.
            pooling: pooling of the lookup.
        """
        device = device or torch.device("cpu")
        self.shards = self._table_shards(pooling)
        backend = registry.get(self._tags()[0].backend)
        fused_params = without_tag(self._config.fused_params or {})
        optimizer = optimizer_spec(self.shards[0].name, fused_params)
        self._emb_module: GroupLookup = backend.create_lookup(
            self.shards, self._feature_table_map, optimizer, device
        )
        output = fused_params.get(OUTPUT_DTYPE)
        self._emb_module.set_output_dtype(output_dtype(self.shards[0].name, output))
        # A table with several column shards on this rank has one placeholder.
        notice = clip_notice([shard.name for shard in self.shards], optimizer)
        self._param_per_table = {
            shard.name: placeholder(shard.dim, shard.dtype, device, notice) for shard in self.shards
        }
        unique = {
            index
            for index, (table, tag) in enumerate(zip(self.shards, self._tags(), strict=True))
            if tag.is_unique and table.key == table.name
        }
        #: Tables whose ids must not repeat in a lookup, with the indices of their features.
        self._unique_tables = [
            (
                self.shards[index].name,
                [f for f, t in enumerate(self._feature_table_map) if t == index],
            )
            for index in sorted(unique)
        ]
        self._takes_scores = any(tag.options.score_source is not None for tag in self._tags())
        self._feature_dims = [self.shards[table].dim for table in self._feature_table_map]
        self._optim = InBackwardOptimizer(
            {f"{name}.weight": parameter for name, parameter in self._param_per_table.items()},
            initial_learning_rate(fused_params),
            device,
            self._dense_states() if self._tags()[0].is_dense else None,
            self._read_dense_states if self._tags()[0].is_dense else None,
        )

    def _check_unique(self, features: KeyedJaggedTensor) -> None:
        """Raises if a lookup repeats an id of a table that was declared duplicate-free."""
        if not self._unique_tables:
            return
        ends = features.offset_per_key()
        for name, table_features in self._unique_tables:
            parts = [features.values()[ends[f] : ends[f + 1]] for f in table_features]
            check_ids(torch.cat(parts), name, "in a lookup of a shard")

    def _unpacked(
        self, features: KeyedJaggedTensor, is_weighted: bool
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Weights of a batch, and its scores as a keyword argument for the lookup."""
        weights, scores = features.weights_or_none(), None
        if self.score_wire is not None:
            weights, scores = self.score_wire.unpack(weights)
        takes = self._takes_scores and scores is not None and self._emb_module.is_training_lookup
        weights = weights.float() if is_weighted and weights is not None else None
        return weights, {"scores": scores} if takes else {}

    def _read_dense_states(self) -> list[dict[str, torch.Tensor]]:
        """The current optimizer states of each shard."""
        return [self._emb_module.dense_states(shard.key) for shard in self.shards]

    def _dense_states(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Optimizer states by placeholder, with TorchRec's names."""
        read = self._read_dense_states()
        states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for name, parameter in self._param_per_table.items():
            shard_indices = [index for index, shard in enumerate(self.shards) if shard.name == name]
            shards = [self.shards[index] for index in shard_indices]
            metadata = self._config.embedding_tables[shard_indices[0]].global_metadata
            states[parameter] = {
                f"{name}.{key}": sharded_state(
                    metadata, shards, [read[i][key] for i in shard_indices]
                )
                if value.is_floating_point()
                else value  # a count, the same for all shards
                for key, value in read[shard_indices[0]].items()
            }
        return states

    def _tags(self) -> list[TableTag]:
        tags = [tag_of(table) for table in self._config.embedding_tables]
        return [tag for tag in tags if tag is not None]

    def _table_shards(self, pooling: PoolingType) -> list[TableShard]:
        return [
            table_shard(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                data_type=self._config.data_type,
                pooling=pooling,
                sharding_type=None,
                sizes=(table.local_rows, table.local_cols),
                offsets=(row_offset, column_offset),
                init_range=tag.init_range,
                options=tag.options,
                full_name=tag.full_name,
            )
            for table, tag, row_offset, column_offset in zip(
                self._config.embedding_tables,
                self._tags(),
                self._row_offset,
                self._col_offset,
                strict=True,
            )
        ]

    @property
    def emb_module(self) -> GroupLookup:
        """The backend's lookup of this group."""
        return self._emb_module

    @property
    def fused_optimizer(self) -> InBackwardOptimizer:
        """The optimizer, which holds the learning rate."""
        return self._optim

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """The placeholders: rows are in the backend and can't be split."""
        return [parameter.detach() for parameter in self._param_per_table.values()]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The placeholders by ``"{table}.weight"``."""
        for name, parameter in self._param_per_table.items():
            yield append_prefix(prefix, f"{name}.weight"), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """No buffers: the backend's tensors are not buffers of the model."""
        yield from ()

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Adds nothing: the sharded collection exports whole tables (``sharding/state``)."""
        return OrderedDict() if destination is None else destination


class BackendEmbeddingBag(BackendKernel, BaseBatchedEmbeddingBag[torch.Tensor]):
    """Kernel for pooled tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        """
        Args:
            config: the group; the fused parameters of each table carry its tag.
            pg: the ranks.
            device: device of the tables; None for the CPU.
            sharding_type: given if the lookup must sum for a mean that TorchRec divides later.
        """
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        # The base class may have changed a mean to a sum, according to the sharding type.
        is_mean = self._pooling == PoolingMode.MEAN
        self._create(device, PoolingType.MEAN if is_mean else PoolingType.SUM)

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: torch.Tensor | None = None,
        vbe_output_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Looks up all features of the group.

        Args:
            features: int64 ids of the group's features, feature-major, with weights if the
                collection is weighted.
            vbe_output: unused; :class:`BackendPooledLookup` merges the outputs of groups.
            vbe_output_offsets: unused.

        Returns:
            ``[batch, sum of the features' dims]``. If features have separate batch sizes, as in
            FBGEMM: ``[sum of bags * dims]``, rank by rank, and feature by feature for each rank.
        """
        self._check_unique(features)
        weights, scores = self._unpacked(features, self._config.is_weighted)
        offsets, learning_rate = features.offsets().long(), self._optim.learning_rate
        if not features.variable_stride_per_key():
            return self._emb_module(
                features.values(), offsets, weights, features.stride(), learning_rate, **scores
            )
        flat = self._emb_module.forward_ragged(
            features.values(),
            offsets,
            weights,
            features.stride_per_key(),
            self._feature_dims,
            learning_rate,
            **scores,
        )
        return rank_major(flat, features.stride_per_key_per_rank(), self._feature_dims)


class BackendEmbedding(BackendKernel, BaseBatchedEmbedding[torch.Tensor]):
    """Kernel for sequence tables: each id gives a row."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            config: the group; the fused parameters of each table carry its tag.
            pg: the ranks.
            device: device of the tables; None for the CPU.
        """
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        self._create(device, PoolingType.SUM)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Looks up all features of the group.

        Args:
            features: int64 ids of the group's features, feature-major.

        Returns:
            ``[ids, dim]`` in the order of the ids. All tables of a collection have the same dim.
        """
        self._check_unique(features)
        ids = features.values()
        flat = self._emb_module.forward_ragged(
            ids,
            torch.arange(ids.numel() + 1, device=ids.device),
            None,
            features.length_per_key(),
            self._feature_dims,
            self._optim.learning_rate,
            **self._unpacked(features, is_weighted=False)[1],
        )
        return flat.view(ids.numel(), self._feature_dims[0])
