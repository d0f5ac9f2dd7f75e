"""Numbers of lookups of a table's rows in training: one byte per row, in the order of rows.

The file is beside the table's file. A code ``c`` stands for ``2 ** (c / 4) - 1`` lookups, rounded.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.manifest import ServingFileRecord
from torchrec_hkv.serving.table_file import TableFile

__all__ = ["CountsWriter", "codes_of", "counts_of", "ops", "read_codes"]

_ops = torch.ops.torchrec_hkv
_STEPS = 4  # number of codes from a count to its double
_MAX = 1 << 30  # kMostHotCount in csrc/serving/hot_rows.h
_PIECE = 1 << 22


def codes_of(counts: Tensor) -> Tensor:
    """Converts counts, int64, not negative, to codes, uint8."""
    return (_STEPS * counts.double().add_(1).log2_()).round_().to(torch.uint8)


def counts_of(codes: Tensor) -> Tensor:
    """Converts codes to counts, int32, at most 2^30."""
    table = (torch.arange(256, dtype=torch.float64) / _STEPS).exp2_().sub_(1).round_()
    table = table.clamp_(max=_MAX).to(codes.device, torch.int32)
    counts = torch.empty(codes.numel(), dtype=torch.int32, device=codes.device)
    for first in range(0, codes.numel(), _PIECE):
        part = codes[first : first + _PIECE]
        torch.index_select(table, 0, part.int(), out=counts[first : first + _PIECE])
    return counts


def read_codes(folder: Path, record: ServingFileRecord, entries: int) -> Tensor:
    """Codes of a table with ``entries`` rows, mapped.

    Raises:
        ValueError: the file is missing, damaged or of another table.
    """
    record.check(folder)
    if record.bytes != entries:
        raise ValueError(
            f"{folder / record.file} has {record.bytes} bytes, but its table has {entries} rows."
        )
    return torch.from_file(str(folder / record.file), size=entries, dtype=torch.uint8)


class CountsWriter:
    """A context manager that writes the counts of a table whose file is written later.

    Args:
        folder: folder of a temporary file with 9 bytes per id.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def __enter__(self) -> CountsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, ids: Tensor, counts: Tensor) -> None:
        """Adds ids and their counts, int64, not negative.

        Raises:
            OSError: the file can't be written.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for part, part_counts in zip(ids.split(_PIECE), counts.split(_PIECE), strict=True):
            self._file.write(len(part).to_bytes(8, "little"))
            self._file.write(part.contiguous().numpy())
            self._file.write(codes_of(part_counts).numpy())

    def finish(self, path: Path, table: TableFile) -> ServingFileRecord | None:
        """Writes the counts of a table's rows; None if none were added.

        Args:
            path: path of the file, in the folder of the table.
            table: the table.

        Raises:
            OSError: the file can't be written.
        """
        if self._file is None or table.entries == 0:
            return None
        with open(path, "xb") as file:  # pages of a mapped file are written without errors
            os.posix_fallocate(file.fileno(), 0, table.entries)
        index, _ = table.map(path.parent)
        codes = torch.from_file(str(path), shared=True, size=table.entries, dtype=torch.uint8)
        self._file.seek(0)
        while head := self._file.read(8):
            n = int.from_bytes(head, "little")
            ids = torch.frombuffer(bytearray(self._file.read(8 * n)), dtype=torch.int64)
            part_codes = torch.frombuffer(bytearray(self._file.read(n)), dtype=torch.uint8)
            rows = _ops.serving_row_numbers(index, ids)
            is_there = rows >= 0
            codes[rows[is_there]] = part_codes[is_there]
        del codes
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
        return ServingFileRecord.of(path)
