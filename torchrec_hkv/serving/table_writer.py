"""Writes the file of a read-only table, block by block."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.hash_table.files.block_files import host_memory
from torchrec_hkv.serving.background_file import PIECE_BYTES, BackgroundFile, FileStream
from torchrec_hkv.serving.row_formats import RowFormat
from torchrec_hkv.serving.table_file import TableFile, geometry_of

_ops = torch.ops.torchrec_hkv


@dataclasses.dataclass(frozen=True)
class _Written:
    """Successive rows in the file.

    Attributes:
        end: one past the last row.
        unit: unit of these rows.
    """

    end: int
    unit: float


class TableWriter:
    """A table's file that is being written.

    Args:
        path: path of the file, which must not exist.
        entries: number of ids.
        dim: columns of the rows.
        row_format: row format of the table.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, path: Path, entries: int, dim: int, row_format: RowFormat) -> None:
        blocks, buckets = geometry_of(entries)
        self._path = path
        self._table_file = TableFile(
            path.name, entries, blocks, buckets, dim, row_format, 1.0, (0, 0)
        )
        self._file = BackgroundFile(path, self._table_file.num_bytes)
        self._is_open = True
        try:
            os.truncate(path, self._table_file.num_bytes)
        except OSError:
            self.close()
            raise
        self._index, self._rows = self._file.stream(0), self._file.stream(self._table_file.rows_at)
        self._written: list[_Written] = []
        #: Number of the next block.
        self.block = 0
        #: Number of blocks, and of ids.
        self.blocks, self.entries = blocks, entries

    @property
    def rows(self) -> int:
        """Number of written rows."""
        return self._written[-1].end if self._written else 0

    def write(self, ids: Tensor, rows: Tensor, chosen: Tensor, end: int, unit: float) -> None:
        """Writes the next blocks.

        Args:
            ids: all ids of the next blocks, int64 ``[n]``.
            rows: uint8 ``[rows, row_bytes]``.
            chosen: indices in ``rows`` of the ids' rows, int64 ``[n]``.
            end: one past the last block.
            unit: unit of the rows.

        Raises:
            ValueError: an id occurs twice, or belongs to another block.
            OSError: the file can't be written.
        """
        index, order = _ops.serving_place(
            ids, None, self.blocks, self._table_file.block_buckets, self.block, end - self.block,
            self.rows,
        )  # fmt: skip
        self._index.append(index.view(torch.uint8).flatten())
        gather_rows(rows, chosen.index_select(0, order), self._rows)
        self.block = end
        row = self.rows + chosen.numel()
        if self._written and self._written[-1].unit == unit:
            self._written.pop()
        self._written.append(_Written(row, unit))

    def finish(self, unit: float) -> TableFile:
        """Flushes the file to the disk, and closes it.

        Args:
            unit: unit of the table. Rows that were written with a smaller unit are converted to it.

        Raises:
            OSError: the file can't be written.
        """
        self._index.finish()
        self._rows.finish()
        self._file.sync()
        self.close()
        of_rows = self._rows.crc32
        if any(written.unit != unit for written in self._written):
            of_rows = self._lower(unit)
        return dataclasses.replace(self._table_file, unit=unit, crc32=(self._index.crc32, of_rows))

    def close(self) -> None:
        """Closes the file."""
        if self._is_open:
            self._is_open = False
            self._file.close()

    def _lower(self, unit: float) -> int:
        """Converts the rows in the file to a larger unit; returns their checksum."""
        row_bytes, row, crc32 = self._table_file.row_bytes, 0, 0
        with open(self._path, "r+b", buffering=0) as file:
            for written in self._written:
                while row < written.end:
                    n = min(written.end - row, max(1, PIECE_BYTES // row_bytes))
                    data = torch.empty(n, row_bytes, dtype=torch.uint8)
                    at = self._table_file.rows_at + row * row_bytes
                    _read(file.fileno(), host_memory(data), at)
                    if written.unit != unit:
                        _ops.serving_lower(data, doublings(written.unit, unit))
                        _write(file.fileno(), host_memory(data), at)
                    crc32 = checksums.crc32(host_memory(data), crc32)
                    row += n
            os.fsync(file.fileno())
        return crc32


def gather_rows(rows: Tensor, order: Tensor, stream: FileStream) -> None:
    """Writes rows in a given order."""
    for piece in order.split(max(1, PIECE_BYTES // rows.shape[1])):
        data = stream.memory(piece.numel() * rows.shape[1])
        _ops.serving_gather(rows, piece, data.view(-1, rows.shape[1]))
        stream.write(data.numel())


def doublings(before: float, after: float) -> int:
    """Number of times that a unit must be doubled to become another."""
    return round(math.log2(after / before))


def _read(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        got = os.preadv(file, [data], at)
        if got == 0:
            raise OSError(f"a table's file ends at byte {at}")
        data, at = data[got:], at + got


def _write(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
