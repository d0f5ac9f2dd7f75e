"""Computes rows of the dense table from cores, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.group import TTGroup
from torchrec_hkv.tensor_train.shapes import TTShape

#: Approximate bytes of a block of rows.
BLOCK_BYTES = 1 << 26


def rows_of(shape: TTShape, cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Computes the rows of some ids.

    Args:
        shape: shape of the table.
        cores: cores of the table.
        ids: int64 of any shape, 0 to ``num_embeddings - 1``, on the cores' device.

    Returns:
        float32 ``[*ids.shape, embedding_dim]``, without gradients.

    Raises:
        ValueError: an id is outside the table (on a CPU), or a core has another size.
    """
    flat = ids.reshape(-1).contiguous()
    offsets = torch.tensor([0, flat.numel()], device=flat.device)
    with torch.no_grad():
        rows = TTGroup([shape]).lookup(cores, flat, offsets, 1, pooled=False)
    return rows.reshape(*ids.shape, shape.embedding_dim)


def dense_blocks(
    shape: TTShape,
    cores: Sequence[Tensor],
    start: int = 0,
    stop: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[tuple[int, Tensor]]:
    """Yields the rows from ``start`` to ``stop`` in blocks.

    Yields:
        The first row number of a block, and its rows, float32 ``[rows, embedding_dim]``.

    Raises:
        ValueError: ``start`` and ``stop`` are not a range of the table's rows.
    """
    stop = shape.num_embeddings if stop is None else stop
    if not 0 <= start <= stop <= shape.num_embeddings:
        raise ValueError(
            f"rows {start} to {stop} were asked for, but the table has rows 0 to "
            f"{shape.num_embeddings}."
        )
    size = max(1, block_bytes // (4 * shape.embedding_dim))
    for first in range(start, stop, size):
        ids = torch.arange(first, min(first + size, stop), device=cores[0].device)
        yield first, rows_of(shape, cores, ids)


def to_dense(
    shape: TTShape, cores: Sequence[Tensor], start: int = 0, stop: int | None = None
) -> Tensor:
    """Computes the rows from ``start`` to ``stop`` of the dense table; all rows by default.

    Besides the result it takes a few times :data:`BLOCK_BYTES` of memory.

    Returns:
        float32 ``[stop - start, embedding_dim]`` on the cores' device.

    Raises:
        ValueError: see :func:`dense_blocks`.
    """
    stop = shape.num_embeddings if stop is None else stop
    blocks = dense_blocks(shape, cores, start, stop)
    out: Tensor | None = None
    for first, rows in blocks:
        if out is None:
            out = rows.new_empty(stop - start, shape.embedding_dim)
        out[first - start : first - start + rows.shape[0]] = rows
    return cores[0].new_empty((0, shape.embedding_dim), dtype=torch.float32) if out is None else out
