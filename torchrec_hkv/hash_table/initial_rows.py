"""Initial rows: a pure function of seed, table name, id and column."""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.hash_table.initializers import Initializer, op_arguments


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


def table_seed(seed: int, table: str) -> int:
    """Mixes a seed with a table's name, so that equal ids of two tables get different rows.

    Args:
        seed: any int64.
        table: the table's name.

    Returns:
        An int64.

    Raises:
        ValueError: the seed is not an int64.
    """
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}, but must be from -2^63 to 2^63 - 1.")
    digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
    name = int.from_bytes(digest, "little")
    # As a Python integer, because NumPy's overflow.
    return _signed(_C.mix64(_C.mix64(operator.index(seed) % (1 << 64)) ^ name))


def initial_rows(
    ids: Tensor,
    dim: int,
    *,
    table: str,
    seed: int = 0,
    initializer: Initializer | None,
    column_offset: int = 0,
) -> Tensor:
    """The rows that ids get when they are inserted.

    Each value is computed from 32 random bits, made by two SplitMix64 mixes of (seed, table, id,
    block of four columns). Uniform rows scale 24 of these bits; normal rows apply the normal
    quantile function in double precision. CPU and GPU use the same bits.

    Args:
        ids: integers ``[n]`` of 8 to 64 bits.
        dim: number of columns, at least 1.
        table: the table's name.
        seed: the table's seed (``HKVOptions.seed``).
        initializer: distribution of the values. None: zeros.
        column_offset: first column, if columns are sharded.

    Returns:
        float32 ``[n, dim]`` on the device of ``ids``.

    Raises:
        TypeError: ids are not integers.
        ValueError: another argument has an invalid value.
    """
    seed = table_seed(seed, table)
    distribution = op_arguments(initializer)
    return torch.ops.torchrec_hkv.initial_rows(
        int64_ids(ids), dim, column_offset, seed, **distribution
    )
