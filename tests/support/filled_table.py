"""A table with random ids, and their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.batches import Bags, random_ids, rows_by_id
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform


def filled_table(
    rows: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[TableGroup, Tensor, Tensor]:
    """Creates a group of one table with a quarter of its slots filled, trained by SGD.

    Returns:
        The group; the ids, int64 ``[rows]``; their rows, float64 ``[rows, dim]`` on the CPU.
    """
    ids = random_ids(rows).unique()
    spec = TableSpec("t", 4 * rows, dim, initializer=Uniform(-1, 1), dtype=dtype)
    group = TableGroup([spec], [0], SGD(), device)
    everyone = Bags.flat(ids).to(device)
    group.find_or_insert(everyone.ids, everyone.offsets, 1)
    rows_of_ids = rows_by_id(group)
    return group, ids, torch.stack([rows_of_ids[id_] for id_ in ids.tolist()]).double()
