"""DeepFM (Guo et al. 2017) over TorchRec's embeddings."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor


class DeepFM(nn.Module):
    """A factorization machine and a deep network over the same rows, added up.

    The fields are the tables of the collection and one of the dense features. Its argument order
    and its call are those of TorchRec's DLRM.

    Args:
        embedding_bag_collection: tables of one dim.
        dense_in_features: how many dense features.
        deep_layer_sizes: of the deep network, without its output.
        dense_device: of all but the tables.
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
        """Logits ``[batch, 1]``."""
        sparse = self.sparse_arch(sparse_features).values()
        flat = torch.cat([sparse, self.dense_arch(dense_features)], dim=1)
        fields = flat.view(flat.shape[0], -1, self.dim)
        # The sum over all pairs of fields of their inner products.
        pairs = (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True) / 2
        return self.first_order(flat) + pairs / fields.shape[1] + self.deep(flat)
