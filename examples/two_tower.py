"""A two-tower model: the product of a user's and an item's vector is the score of the pair."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

DIM, OUT = 32, 32


class Tower(nn.Module):
    """One tower: a hash table, and a network over its rows.

    Args:
        name: name of the table and its feature.
        rows: number of rows of the table.
        device: device of the network.
    """

    def __init__(self, name: str, rows: int, device: torch.device) -> None:
        super().__init__()
        self.name = name
        config = EmbeddingBagConfig(
            name=name, feature_names=[name], embedding_dim=DIM, num_embeddings=rows
        )
        self.rows = EmbeddingBagCollection([config], device=torch.device("meta"))
        self.layers = nn.Sequential(
            nn.Linear(DIM, 64, device=device), nn.ReLU(), nn.Linear(64, OUT, device=device)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Computes vectors ``[n, OUT]`` of ids, int64 ``[n]``."""
        one_each = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
        features = KeyedJaggedTensor(keys=[self.name], values=ids, lengths=one_each)
        return self.layers(self.rows(features).values())


class TwoTower(nn.Module):
    """Two towers, trained with a softmax over the items of the batch.

    Args:
        users: number of rows of the users' table.
        items: number of rows of the items' table.
        device: device of the networks.
    """

    def __init__(self, users: int, items: int, device: torch.device) -> None:
        super().__init__()
        self.user = Tower("user", users, device)
        self.item = Tower("item", items, device)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Computes the loss of a batch.

        The negatives are the items of other users, which occur as often as they are liked. So the
        products learn how much more a user likes an item than other users do. For ranking, the
        logarithm of the item's share of all likes is added.

        Args:
            users: ids of users, int64 ``[n]``.
            items: the item that each user liked, int64 ``[n]``.
        """
        scores = self.user(users) @ self.item(items).T
        # An item that occurs twice is not a negative of itself.
        same = (items.unsqueeze(0) == items.unsqueeze(1)) & ~torch.eye(
            len(items), dtype=torch.bool, device=items.device
        )
        targets = torch.arange(len(items), device=items.device)
        return nn.functional.cross_entropy(scores.masked_fill(same, float("-inf")), targets)
