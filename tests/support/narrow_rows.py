"""Tables with 16-bit or int8 rows, trained with bags of one id, for tests of rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.batches import Bags, lookup
from torchrec_hkv.hash_table import Optimizer, TableGroup, TableSpec


def narrow_group(
    dtype: torch.dtype,
    device: str,
    optimizer: Optimizer,
    dim: int = 4,
    capacity: int = 6000,
    initializer=None,
    name: str = "t",
    **options,
) -> TableGroup:
    """Creates a group of one table.

    Args:
        dtype: dtype of the rows.
        device: device of the table.
        optimizer: the optimizer.
        dim: number of columns.
        capacity: number of rows.
        initializer: the initial rows.
        name: name of the table.
        options: further fields of its ``TableSpec``.
    """
    spec = TableSpec(name, capacity, dim, initializer=initializer, dtype=dtype, **options)
    return TableGroup([spec], [0], optimizer, device=device)


def train_rows(group: TableGroup, ids: Tensor, grad: Tensor, learning_rate: float = 1.0) -> None:
    """Trains one step with bags of one id.

    Args:
        group: the table.
        ids: int64 ``[n]``.
        grad: float32 ``[n, dim]``.
        learning_rate: learning rate of the step.
    """
    bags = Bags(ids, torch.arange(len(ids) + 1), len(ids)).to(group.device)
    lookup(group, bags, learning_rate=learning_rate).backward(grad.to(group.device))
