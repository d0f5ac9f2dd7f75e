"""Shards of a backend's tables without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.backends import BackendOptions, GroupLookup, TableShard


def table_shard(capacity: int, dim: int, options: BackendOptions, **changes: Any) -> TableShard:
    """Creates a shard of a whole table, with changes.

    Args:
        capacity: number of rows.
        dim: number of columns.
        options: options of the backend.
        changes: other values of fields of :class:`TableShard`.
    """
    values: dict[str, Any] = {
        "name": "t",
        "capacity": capacity,
        "dim": dim,
        "num_embeddings": capacity,
        "embedding_dim": dim,
        "row_offset": 0,
        "column_offset": 0,
        "dtype": torch.float32,
        "pooling": "sum",
        "init_range": (-0.1, 0.1),
        "options": options,
    }
    return TableShard(**{**values, **changes})


def look_up(lookup: GroupLookup, ids: list[int], learning_rate: float = 0.5) -> Tensor:
    """Looks up ids with one feature and bags of one id; returns the output."""
    device = lookup._group.device
    offsets = torch.arange(len(ids) + 1, device=device)
    rate = torch.tensor(learning_rate, device=device)
    return lookup(torch.tensor(ids, device=device), offsets, None, len(ids), rate)
