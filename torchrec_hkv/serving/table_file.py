"""The file of a read-only table, which is mapped into memory: its index and its rows.

The index comes first; the rows follow at the next multiple of 4096 bytes. ``csrc/serving/table.h``
describes both. Pages are read at their first lookup, and processes on one machine share them.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.serving import ops, row_formats
from torchrec_hkv.serving.resident_file import read_resident
from torchrec_hkv.serving.row_formats import RowFormat

__all__ = [
    "BUCKET_BYTES",
    "CHANGES_LOAD",
    "TableFile",
    "build_layer",
    "geometry_of",
    "ops",
    "place_layer",
]

_ops = torch.ops.torchrec_hkv
_PAGE = 4096
_BUCKET_IDS = 7
#: Bytes of a bucket of the index.
BUCKET_BYTES = 64
#: Largest number of ids in a block, so that a block's index fits into a core's cache while it is
#: built.
_BLOCK_IDS = 26000
#: Load factor of the index of a file.
_LOAD = 0.93
#: Load factor of the index of changes. A lookup searches all ids there first, and most are missing.
#: It then also reads an id's second bucket, if an id of the first bucket is in its own second one.
#: This is the case for 3 % of the buckets at this load, and for half of them at a file's load.
CHANGES_LOAD = 0.5


def geometry_of(entries: int, load: float = _LOAD) -> tuple[int, int]:
    """Number of blocks, and of buckets in a block, of the index for a number of ids. From some
    hundred ids on, the load factor is at most 0.02 less than ``load``."""
    blocks = max(1, -(-entries // _BLOCK_IDS))
    ids = entries / blocks
    # Ids fall into blocks at random: leave room for 8 standard deviations above the mean.
    spread = 0.0 if blocks == 1 else 8.0 * math.sqrt(ids)
    min_slots = max(ids / load, (ids + spread) / 0.985)
    return blocks, max(1, math.ceil(min_slots / _BUCKET_IDS))


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file of a table, as a manifest describes it.

    Attributes:
        file: name of the file.
        entries: number of ids.
        blocks: number of blocks of the index.
        block_buckets: buckets in a block.
        dim: columns of a row.
        row_format: format of the rows.
        unit: unit of scales and offsets of quantised rows (:func:`row_formats.unit_for`).
        crc32: checksums of the index and of the rows.
    """

    file: str
    entries: int
    blocks: int
    block_buckets: int
    dim: int
    row_format: RowFormat
    unit: float
    crc32: tuple[int, int]

    @property
    def index_bytes(self) -> int:
        return self.blocks * self.block_buckets * BUCKET_BYTES

    @property
    def row_bytes(self) -> int:
        return row_formats.row_bytes(self.row_format, self.dim)

    @property
    def rows_at(self) -> int:
        return -(-self.index_bytes // _PAGE) * _PAGE

    @property
    def num_bytes(self) -> int:
        return self.rows_at + self.entries * self.row_bytes

    def map(self, folder: Path, resident: bool = False) -> tuple[Tensor, Tensor]:
        """Maps the index and the rows of the file into memory.

        Args:
            folder: folder of the file.
            resident: whether to read the file into this process's memory instead.

        Returns:
            The index, int64 ``[blocks, block_buckets, 8]``, and the rows, uint8 ``[entries,
            row_bytes]``. Don't write to them.

        Raises:
            ValueError: the file is missing or has the wrong size.
        """
        path = folder / self.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        if size != self.num_bytes:
            raise ValueError(f"{path} has {size} bytes, but its table takes {self.num_bytes}.")
        if resident:
            data = read_resident(path, size)
        else:
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        index = data[: self.index_bytes].view(torch.int64)
        rows = data[self.rows_at :].view(self.entries, self.row_bytes)
        return index.view(self.blocks, self.block_buckets, 8), rows

    def verify(self, folder: Path) -> None:
        """Reads the file and compares its checksums.

        Raises:
            ValueError: the file is damaged.
        """
        for part, expected, name in zip(
            self.map(folder), self.crc32, ("index", "rows"), strict=True
        ):
            found = 0
            for piece in part.flatten().split(1 << 24):
                found = checksums.crc32(memoryview(piece.numpy()), found)
            if found != expected:
                raise ValueError(
                    f"{folder / self.file} is damaged: the checksum of its {name} is {found}, but "
                    f"the manifest names {expected}."
                )


def build_layer(ids: Tensor, data: Tensor, erased: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Builds the index and the rows of a few ids in memory.

    Args:
        ids: int64 ``[n]``, distinct.
        data: uint8 ``[n, row_bytes]``.
        erased: bool ``[n]``, True for ids that have no row even if a lower layer has one. None:
            False for all ids.

    Returns:
        Index and rows, as :meth:`TableFile.map`.
    """
    index, order = place_layer(ids, erased)
    return index, data.index_select(0, order)


def place_layer(ids: Tensor, erased: Tensor | None, load: float = _LOAD) -> tuple[Tensor, Tensor]:
    """Like :func:`build_layer`, but returns the order of the rows instead of the rows: int64
    ``[n]``, the index in ``ids`` of each row. ``load`` is the load factor of the index."""
    blocks, buckets = geometry_of(ids.numel(), load)
    return _ops.serving_place(ids, erased, blocks, buckets, 0, blocks, 0)
