"""Row-wise input distribution: raw ids and row numbers, bucketized and sent together."""

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
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def bucketize(
    lengths: torch.Tensor,
    values: torch.Tensor,
    block_sizes: torch.Tensor,
    world_size: int,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sorts ids by the rank that owns them; the ids of a bag stay in order.

    Args:
        lengths: int32 or int64 ``[features * batch]``, feature-major.
        values: int64 ``[n]``, the ids.
        block_sizes: int64 ``[features]``: rows a rank where an id is a row number, 0 where any
            int64 is an id, routed by its hash and sent as it is.
        world_size: number of ranks.
        weights: ``[n]`` or None.

    Returns:
        Lengths ``[world_size * features * batch]``, rank-major; ids ``[n]``; weights or None.
    """
    out_lengths, out_values, out_weights, _ = torch.ops.torchrec_hkv.bucketize(
        lengths, values, block_sizes, world_size, weights
    )
    return out_lengths, out_values, None if weights is None else out_weights


class RowWiseFeaturesDist(RwSparseFeaturesDist):
    """TorchRec's row-wise distribution, where a feature's ids may be any int64."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        feature_hash_sizes: Sequence[int],
        feature_is_hashed: Sequence[bool],
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            pg: the ranks.
            feature_hash_sizes: ``num_embeddings`` of each feature's table.
            feature_is_hashed: for each feature, whether its ids are routed by hash (True) or are
                row numbers in contiguous blocks, as those of stock tables (False).
            device: of the ids.
        """
        super().__init__(
            pg=pg,
            num_features=len(feature_hash_sizes),
            feature_hash_sizes=list(feature_hash_sizes),
            device=device,
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
            sparse_features: int64 ids, the same batch size for every feature.
        """
        lengths, values, weights = bucketize(
            sparse_features.lengths().view(-1),
            sparse_features.values(),
            self._block_sizes,
            self._world_size,
            sparse_features.weights_or_none(),
        )
        return self._dist(
            KeyedJaggedTensor(
                keys=_fx_wrap_gen_list_n_times(sparse_features.keys(), self._world_size),
                values=values,
                weights=weights,
                lengths=lengths,
                stride=_fx_wrap_stride(sparse_features),
                stride_per_key_per_rank=_fx_wrap_stride_per_key_per_rank(
                    sparse_features, self._world_size
                ),
            )
        )
