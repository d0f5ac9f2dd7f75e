"""The row an id starts from: a pure function of seed, table name, id and column."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.hash_table.initializers import Initializer, op_arguments


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


def table_seed(seed: int, table: str) -> int:
    """Mixes a seed with a table's name, so that equal ids of two tables start from different rows.

    Args:
        seed: any int64.
        table: the table's name.

    Returns:
        An int64.

    Raises:
        ValueError: the seed is no int64.
    """
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}, but must be from -2^63 to 2^63 - 1.")
    digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
    name = int.from_bytes(digest, "little")
    return _signed(_C.mix64(_C.mix64(seed % (1 << 64)) ^ name))


def initial_rows(
    ids: Tensor,
    dim: int,
    *,
    table: str,
    seed: int = 0,
    initializer: Initializer | None,
    column_offset: int = 0,
) -> Tensor:
    """Rows that ids start from when a table first meets them.

    A value follows from 32 random bits, which two SplitMix64 mixes of (seed, table, id, block of
    four columns) make: scaled from 24 of them where rows are uniform, by the normal's quantile
    function in double precision where they are normal. The same bits on a CPU and on a GPU.

    Args:
        ids: integers ``[n]`` of 8 to 64 bits.
        dim: columns to make, at least 1.
        table: the table's name.
        seed: the table's seed (``HKVOptions.seed``).
        initializer: distribution of the values. None: zeros.
        column_offset: first column, where columns are sharded.

    Returns:
        float32 ``[n, dim]`` on the device of ``ids``.

    Raises:
        TypeError: ids are not integers.
        ValueError: another argument is not as above.
    """
    seed = table_seed(seed, table)
    distribution = op_arguments(initializer)
    return torch.ops.torchrec_hkv.initial_rows(
        int64_ids(ids), dim, column_offset, seed, **distribution
    )
