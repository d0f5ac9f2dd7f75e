"""Small embeddings of torchrec_hkv.nn."""

from __future__ import annotations

from typing import Any

import torch

from torchrec_hkv import HierarchicalHashEmbedding, MultiTableHKVEmbedding


def make_embedding(dim: int = 4, device: str = "cpu", **changes: Any) -> HierarchicalHashEmbedding:
    """Creates a module with room for every id of a test, and reproducible rows."""
    arguments = {"max_capacity": 4096, "seed": 7, "device": device, **changes}
    return HierarchicalHashEmbedding(dim, **arguments)


def make_tables(
    num_tables: int = 3, dim: int = 4, device: str = "cpu", **changes: Any
) -> MultiTableHKVEmbedding:
    """The same with several tables."""
    arguments = {"max_capacity_per_table": 4096, "seed": 7, "device": device, **changes}
    return MultiTableHKVEmbedding(num_tables, dim, **arguments)


def rows_of(embedding: HierarchicalHashEmbedding, ids: list[int]) -> torch.Tensor:
    """Returns the current rows in host memory, without changes."""
    with torch.no_grad():
        return embedding(torch.tensor(ids, device=embedding.device)).cpu()
