"""Reads and writes rows of dense tables by row number, in batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def put_row_numbers(
    weight: Tensor, batches: Iterable[tuple[Tensor, Tensor]], first_row: int, first_column: int
) -> None:
    """Writes rows into a shard. Rows and columns of other shards are skipped.

    Args:
        weight: ``[rows, columns]``, the rows of the shard; written in place.
        batches: pairs of row numbers, int64 ``[n]``, and whole rows, ``[n, embedding_dim]``.
        first_row: number of the shard's first row.
        first_column: number of the shard's first column.
    """
    for numbers, rows in batches:
        in_shard = (numbers >= first_row) & (numbers < first_row + weight.shape[0])
        at = (numbers[in_shard] - first_row).to(weight.device)
        part = rows[in_shard][:, first_column : first_column + weight.shape[1]]
        weight[at] = part.to(weight)


def collect_rows(
    table: str, num_rows: int, dim: int, batches: Iterable[tuple[Tensor, Tensor]]
) -> Tensor:
    """Gathers all rows of a table, float32 ``[num_rows, dim]``, on the CPU.

    Raises:
        ValueError: a row number is outside the table, or a row is missing.
    """
    dense = torch.empty(num_rows, dim)
    has_come = torch.zeros(num_rows, dtype=torch.bool)
    for numbers, rows in batches:
        check_row_numbers(table, numbers, num_rows)
        dense[numbers] = rows.float()
        has_come[numbers] = True
    missing = int((~has_come).sum())
    if missing:
        raise ValueError(
            f"table {table!r}: {missing} of {num_rows} rows were not given, the first being "
            f"{int((~has_come).nonzero()[0])}, but it needs all of them."
        )
    return dense


def check_row_numbers(table: str, numbers: Tensor, num_rows: int) -> None:
    """Checks that ids are row numbers of a table.

    Raises:
        ValueError: an id is outside ``[0, num_rows)``; the message names the first one.
    """
    outside = (numbers < 0) | (numbers >= num_rows)
    if outside.any():
        raise ValueError(
            f"table {table!r} has no row {int(numbers[outside][0])}: allowed are row numbers from "
            f"0 to {num_rows - 1}."
        )
