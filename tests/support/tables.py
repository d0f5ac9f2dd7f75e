"""Creates HashTables and reads their contents, for tests of single operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.batches import random_ids
from tests.support.table_observation import joined, score_of, signed
from torchrec_hkv.hash_table import HashTable, Uniform, initial_rows


def make(device: str, capacity: int = 64, dim: int = 4, **options: Any) -> HashTable:
    """Creates a table, by default with different initial rows."""
    return HashTable(dim, capacity, device=device, **{"initializer": Uniform(-1, 1), **options})


def distinct_ids(n: int, device: str) -> Tensor:
    """Returns distinct ids from the whole int64 range, in random order."""
    ids = random_ids(n + 10).unique()
    return ids[torch.randperm(len(ids))[:n]].to(device)


def random_rows(table: HashTable, n: int) -> Tensor:
    """Draws rows for a table, with its dim, device and dtype of calls."""
    return torch.randn(n, table.dim).to(table.group.row_dtype).to(table.device)


def scores_tensor(scores: Sequence[int], device: str) -> Tensor:
    """Converts scores to a tensor for a table."""
    return torch.tensor([signed(score) for score in scores], device=device, dtype=torch.int64)


def contents(table: HashTable) -> dict[int, tuple[tuple[float, ...], int, tuple[float, ...]]]:
    """Returns (row, score, state) by id for the whole table."""
    entries = joined(table.export())
    if entries is None:
        return {}
    ids = entries.ids.tolist()
    assert len(set(ids)) == len(ids)
    rows = [tuple(row) for row in entries.rows.tolist()]
    states = [tuple(state) for state in entries.states.tolist()]
    scores = [score_of(score, table.eviction) for score in entries.scores.tolist()]
    return dict(zip(ids, zip(rows, scores, states, strict=True), strict=True))


def scores_of(table: HashTable) -> dict[int, int]:
    """Returns scores by id."""
    return {id_: score for id_, (_, score, _) in contents(table).items()}


def expected_initial_rows(table: HashTable, ids: Tensor, **options: Any) -> Tensor:
    """Computes initial rows of a table created by :func:`make` with these options."""
    initializer = options.get("initializer", Uniform(-1, 1))
    name, seed = options.get("name", "table"), options.get("seed", 0)
    rows = initial_rows(ids, table.dim, table=name, seed=seed, initializer=initializer)
    return rows.to(table.dtype)


def constant_scores(table: HashTable, n: int, score: int = 1) -> Tensor | None:
    """Returns a score per id if the policy needs scores, otherwise None."""
    if table.eviction != "customized":
        return None
    return torch.full((n,), signed(score), dtype=torch.int64, device=table.device)
