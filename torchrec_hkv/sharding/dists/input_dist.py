"""Input distribution of ids and row numbers; row-wise sharding bucketizes them by owner first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import (
    _fx_wrap_gen_list_n_times,
    _fx_wrap_stride,
    _fx_wrap_stride_per_key_per_rank,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.all_to_all import CountedAllToAll, OutgoingBatch
from torchrec_hkv.sharding.dists.features import in_order
from torchrec_hkv.sharding.dists.variable_batch import padded_lengths


def bucketize(
    features: KeyedJaggedTensor, block_sizes: torch.Tensor, world_size: int
) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Sorts ids by the rank that owns them. The ids of a bag keep their order.

    Args:
        features: int64 ids.
        block_sizes: int64 ``[features]``: rows of a rank for features whose ids are row numbers; 0
            for features with any int64 ids, which are mapped by hash and sent unchanged.
        world_size: number of ranks.

    Returns:
        ``world_size`` copies of the features, rank-major, and the new position of each id.
    """
    lengths, weights = features.lengths().view(-1), features.weights_or_none()
    places = None
    if features.variable_stride_per_key():
        lengths, places = padded_lengths(lengths, features.stride_per_key())
    padded = lengths.numel()
    lengths, values, out_weights, permute = _bucketize(
        lengths, features.values(), block_sizes, world_size, weights
    )
    if places is not None:
        lengths = lengths.view(world_size, padded).index_select(1, places).flatten()
    bucketized = KeyedJaggedTensor(
        keys=_fx_wrap_gen_list_n_times(features.keys(), world_size),
        values=values,
        weights=None if weights is None else out_weights,
        lengths=lengths,
        stride=_fx_wrap_stride(features),
        stride_per_key_per_rank=_fx_wrap_stride_per_key_per_rank(features, world_size),
    )
    return bucketized, permute


def _bucketize(
    lengths: torch.Tensor,
    values: torch.Tensor,
    block_sizes: torch.Tensor,
    world_size: int,
    weights: torch.Tensor | None,
    blocks: bool = False,
    permutes: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Calls the op, also for 64-bit weights."""
    op = torch.ops.torchrec_hkv.bucketize
    if weights is None or weights.dtype == torch.float32:
        return op(lengths, values, block_sizes, world_size, weights, blocks, permutes)
    lengths, values, _, permute = op(lengths, values, block_sizes, world_size, None, blocks, True)
    return lengths, values, torch.empty_like(weights).index_copy_(0, permute, weights), permute


class RowWiseFeaturesDist(RwSparseFeaturesDist):
    """TorchRec's row-wise input distribution, extended for features with any int64 ids."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        feature_hash_sizes: Sequence[int],
        feature_is_hashed: Sequence[bool],
        *,
        is_sequence: bool,
        needs_counts: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            pg: the ranks.
            feature_hash_sizes: ``num_embeddings`` of each feature's table.
            feature_is_hashed: for each feature, whether its ids are mapped by hash (True) or are
                row numbers in contiguous blocks, as in stock tables (False).
            is_sequence: whether the order of the ids is needed later to reorder rows.
            needs_counts: see :class:`CountedAllToAll`.
            device: device of the ids.
        """
        num_features = len(feature_hash_sizes)
        super().__init__(
            pg=pg,
            num_features=num_features,
            feature_hash_sizes=list(feature_hash_sizes),
            device=device,
            is_sequence=is_sequence,
        )
        del self._dist
        self._exchange = CountedAllToAll(
            pg, [num_features] * pg.size(), 1, device, needs_counts=needs_counts
        )
        is_hashed = torch.tensor(list(feature_is_hashed), dtype=torch.bool, device=device)
        self.register_buffer(
            "_block_sizes",
            self._feature_block_sizes_tensor.masked_fill(is_hashed, 0),
            persistent=False,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange.

        Args:
            sparse_features: int64 ids.
        """
        # TorchRec's ShardedEmbeddingCollection reads this attribute after the call.
        self.unbucketize_permute_tensor = None
        if self._world_size == 1:  # every id is on its rank already
            return self._exchange(sparse_features)
        if sparse_features.variable_stride_per_key():
            bucketized, permute = bucketize(sparse_features, self._block_sizes, self._world_size)
            begun = self._exchange(bucketized)
        else:
            weights = sparse_features.weights_or_none()
            lengths, blocks, bucketized_weights, permute = _bucketize(
                sparse_features.lengths(),
                sparse_features.values(),
                self._block_sizes,
                self._world_size,
                weights,
                True,
                self._is_sequence,
            )
            begun = self._exchange.send(
                OutgoingBatch(
                    sparse_features.keys(),
                    sparse_features.stride(),
                    lengths,
                    None,
                    None if weights is None else bucketized_weights,
                    blocks,
                )
            )
        if self._is_sequence:
            self.unbucketize_permute_tensor = permute
        return begun


class TableWiseFeaturesDist(TwSparseFeaturesDist):
    """TorchRec's input distribution for whole tables and columns."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        features_per_rank: list[int],
        device: torch.device | None,
        *,
        needs_counts: bool = True,
    ) -> None:
        """
        Args:
            pg: the ranks.
            features_per_rank: number of features that each rank looks up.
            device: device of the ids.
            needs_counts: see :class:`CountedAllToAll`.
        """
        super().__init__(pg, features_per_rank)
        del self._dist
        self._exchange = CountedAllToAll(
            pg, features_per_rank, 1, device, needs_counts=needs_counts
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange.

        Args:
            sparse_features: int64 ids.
        """
        return self._exchange(sparse_features)


class TableRowWiseFeaturesDist(TwRwSparseFeaturesDist):
    """TorchRec's input distribution for rows sharded over the ranks of a host, extended for
    features with any int64 ids."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        local_size: int,
        features_per_rank: Sequence[int],
        feature_hash_sizes: Sequence[int],
        feature_is_hashed: Sequence[bool],
        device: torch.device | None = None,
        *,
        needs_counts: bool = True,
    ) -> None:
        """
        Args:
            pg: the ranks.
            local_size: number of ranks of a host.
            features_per_rank: number of features that each rank looks up.
            feature_hash_sizes: ``num_embeddings`` of each feature's table.
            feature_is_hashed: see :class:`RowWiseFeaturesDist`.
            device: device of the ids.
            needs_counts: see :class:`CountedAllToAll`.
        """
        super().__init__(
            pg=pg,
            local_size=local_size,
            features_per_rank=list(features_per_rank),
            feature_hash_sizes=list(feature_hash_sizes),
            device=device,
        )
        del self._dist
        self._is_alone = pg.size() == 1
        hosts = pg.size() // local_size
        self._exchange = CountedAllToAll(
            pg, list(features_per_rank), hosts, device, needs_counts=needs_counts
        )
        is_hashed = torch.tensor(list(feature_is_hashed), dtype=torch.bool, device=device)
        self.register_buffer(
            "_block_sizes",
            self._feature_block_sizes_tensor.long().masked_fill(is_hashed, 0),
            persistent=False,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange.

        Args:
            sparse_features: int64 ids.
        """
        if self._is_alone:  # every id is on its rank already
            return self._exchange(sparse_features)
        bucketized, _ = bucketize(sparse_features, self._block_sizes, self._local_size)
        return self._exchange(
            in_order(bucketized, self._sf_staggered_shuffle, self._sf_staggered_shuffle_tensor)
        )
