"""DeepFM (Guo et al. 2017) over TorchRec's embeddings."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor


class DeepFM(nn.Module):
    """The sum of a factorization machine and a deep network over the same rows.

    The fields are the tables of the collection and one field of the dense features. Arguments and
    calls are like those of TorchRec's DLRM.

    Args:
        embedding_bag_collection: tables, all of the same dim.
        dense_in_features: number of dense features.
        deep_layer_sizes: layer sizes of the deep network, without its output.
        dense_device: device of all parameters but the tables.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        deep_layer_sizes: list[int],
        dense_device: torch.device,
    ) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        self.sparse_arch = embedding_bag_collection
        self.dim = tables[0].embedding_dim
        fields = sum(len(table.feature_names) for table in tables) + 1
        self.dense_arch = nn.Linear(dense_in_features, self.dim, device=dense_device)
        sizes = [fields * self.dim, *deep_layer_sizes]
        layers = [
            layer
            for before, size in itertools.pairwise(sizes)
            for layer in (nn.Linear(before, size, device=dense_device), nn.ReLU())
        ]
        self.deep = nn.Sequential(*layers, nn.Linear(sizes[-1], 1, device=dense_device))
        self.first_order = nn.Linear(fields * self.dim, 1, device=dense_device)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Returns logits ``[batch, 1]``."""
        sparse = self.sparse_arch(sparse_features).values()
        flat = torch.cat([sparse, self.dense_arch(dense_features)], dim=1)
        fields = flat.view(flat.shape[0], -1, self.dim)
        # The sum of the inner products of all pairs of fields.
        pairs = (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True) / 2
        return self.first_order(flat) + pairs / fields.shape[1] + self.deep(flat)
