"""A small SASRec: a transformer over the last items of a user. Each item has a row in a table.

Items of histories and candidates are looked up together, as sequences of one table. The loss is a
softmax over sampled candidates. Corrected by sampling frequencies, it approximates the softmax over
all items, so that the product of a history's vector and an item's row ranks the items.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

DIM, HEADS, LAYERS = 48, 2, 2
# Bound of initial rows.
BOUND = DIM**-0.5


class Block(nn.Module):
    """Causal attention, and a network per position."""

    def __init__(self, dropout: float, device: torch.device) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(DIM, device=device)
        self.qkv = nn.Linear(DIM, 3 * DIM, device=device)
        self.mix = nn.Linear(DIM, DIM, device=device)
        self.before_layers = nn.LayerNorm(DIM, device=device)
        self.layers = nn.Sequential(
            nn.Linear(DIM, 2 * DIM, device=device),
            nn.GELU(),
            nn.Linear(2 * DIM, DIM, device=device),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[batch, length, DIM]`` to the same shape."""
        batch, length, _ = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, DIM // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.mix(found.transpose(1, 2).reshape(batch, length, DIM)))
        return x + self.dropout(self.layers(self.before_layers(x)))


class SequenceModel(nn.Module):
    """Predicts the next item.

    Args:
        rows: number of rows of the items' table.
        length: largest number of items of a history.
        dropout: dropout in training.
        device: device of the transformer.
    """

    def __init__(self, rows: int, length: int, dropout: float, device: torch.device) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item",
            feature_names=["history", "candidate"],
            embedding_dim=DIM,
            num_embeddings=rows,
            weight_init_min=-BOUND,
            weight_init_max=BOUND,
        )
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.positions = nn.Parameter(torch.randn(length, DIM, device=device) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout, device) for _ in range(LAYERS))
        self.last = nn.LayerNorm(DIM, device=device)
        self.length = length

    def forward(
        self, histories: torch.Tensor, lengths: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the vectors of the next items, and looks up rows.

        Args:
            histories: items of all users, one after the other, int64 ``[n]``.
            lengths: length of each history, at least 1, int64 ``[users]``.
            candidates: candidates for the next items, int64 ``[users * m]``.

        Returns:
            Predictions of the next item after each item of the histories, ``[users, longest,
            DIM]``; the rows of these items, of the same shape, with zeros after the end of a
            history; and the rows of the candidates, ``[users * m, DIM]``.
        """
        users = len(lengths)
        each = torch.full_like(lengths, len(candidates) // max(users, 1))
        features = KeyedJaggedTensor(
            keys=["history", "candidate"],
            values=torch.cat([histories, candidates]),
            lengths=torch.cat([lengths, each]),
        )
        rows = self.items(features)
        longest = int(lengths.max()) if users else 1
        items = rows["history"].to_padded_dense(longest)
        items = items.view(users, longest, DIM)
        x = items * DIM**0.5 + self.positions[:longest]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x), items, rows["candidate"].values()


def sampled_softmax(
    vectors: torch.Tensor,
    targets: torch.Tensor,
    target_rows: torch.Tensor,
    candidates: torch.Tensor,
    candidate_rows: torch.Tensor,
    log_share: torch.Tensor,
    candidate_log_share: torch.Tensor,
) -> torch.Tensor:
    """Computes the mean loss of predictions.

    Args:
        vectors: predictions, ``[n, DIM]``.
        targets: the right items, int64 ``[n]``.
        target_rows: rows of the targets, ``[n, DIM]``.
        candidates: sampled items, int64 ``[m]``.
        candidate_rows: rows of the candidates, ``[m, DIM]``.
        log_share: logarithms of the targets' sampling probabilities, ``[n]``.
        candidate_log_share: logarithms of the candidates' sampling probabilities, ``[m]``.
    """
    right = (vectors * target_rows).sum(1) - log_share
    others = vectors @ candidate_rows.T - candidate_log_share
    # A target among the candidates is not a negative.
    others = others.masked_fill(targets.unsqueeze(1) == candidates.unsqueeze(0), float("-inf"))
    scores = torch.cat([right.unsqueeze(1), others], dim=1)
    return nn.functional.cross_entropy(scores, torch.zeros_like(targets))
