"""The file of a read-only table: its index and its rows, to be mapped into memory.

The index comes first; the rows follow at the next multiple of 4096 bytes. ``csrc/serving/table.h``
describes both. Pages are read at their first lookup, and processes on one machine share them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import torch
from torch import Tensor

from torchrec_hkv.serving import ops, row_formats
from torchrec_hkv.serving.row_formats import RowFormat

__all__ = ["TableBuilder", "TableFile", "build_layer", "ops"]

_ops = torch.ops.torchrec_hkv
_PAGE = 4096
_BUCKET_BYTES, _BUCKET_IDS = 64, 7
#: Largest number of ids in a block, so that a block's index fits into a core's cache while it is
#: built.
_BLOCK_IDS = 26000
#: Default memory of a builder for ids and rows, in bytes. The rest goes to files by ranges of
#: blocks.
MEMORY_BYTES = 1 << 30
_SPILLED_PARTS = 256
#: Numbers that are converted at a time: they stay in a core's cache, and PyTorch doesn't share them
#: out to threads, which costs more than it saves.
_CONVERTED = 32000


def geometry_of(entries: int) -> tuple[int, int]:
    """``(blocks, buckets in each)`` of the index for this many ids. The load is at least .91 from
    some hundred ids on."""
    blocks = max(1, -(-entries // _BLOCK_IDS))
    ids = entries / blocks
    # Ids fall into blocks at random: leave room for 8 standard deviations above the mean.
    spread = 0.0 if blocks == 1 else 8.0 * math.sqrt(ids)
    wanted = max(ids / 0.93, (ids + spread) / 0.985)
    return blocks, max(1, math.ceil(wanted / _BUCKET_IDS))


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
        return self.blocks * self.block_buckets * _BUCKET_BYTES

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
            resident: whether to read them into this process's memory instead.

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
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if resident:
            data = _ops.serving_resident(data)
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
                found = zlib.crc32(piece.numpy(), found)
            if found != expected:
                raise ValueError(
                    f"{folder / self.file} is damaged: the checksum of its {name} is {found}, but "
                    f"the manifest names {expected}."
                )


class TableBuilder:
    """Builds a table from ids and rows in any order.

    Args:
        dim: columns of the rows.
        row_format: row format of the table.
        folder: folder of temporary files for ids and rows that don't fit in ``memory_bytes``.
        memory_bytes: memory for ids and rows, in bytes.
    """

    def __init__(
        self, dim: int, row_format: RowFormat, folder: Path, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._dim, self._format = dim, row_format
        self._memory_bytes = memory_bytes
        # Records in memory, int32 [n, 2 + dim]: an id and its row.
        self._records: list[Tensor] = []
        self._held = 0
        self._entries = 0
        self._largest = 0.0
        self._folder = folder
        self._spilled: TemporaryDirectory[str] | None = None

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Adds entries.

        Args:
            ids: int64 ``[n]``, without duplicates over all calls.
            rows: float32 ``[n, dim]``.

        Raises:
            ValueError: the format is quantised and a row is not finite.
        """
        if ids.numel() == 0:
            return
        ids, rows = ids.contiguous(), rows.float().contiguous()
        if self._format in ("int8", "int4"):
            largest = float(rows.abs().max())
            if not math.isfinite(largest):
                bad = ids[~rows.isfinite().all(dim=1)][0]
                raise ValueError(
                    f"the row of id {int(bad)} is not finite, and can't be written as "
                    f"{self._format}: leave its table as it is."
                )
            self._largest = max(self._largest, largest)
        self._records.append(
            torch.cat([ids.view(torch.int32).view(-1, 2), rows.view(torch.int32)], dim=1)
        )
        self._entries += ids.numel()
        self._held += ids.numel() * (8 + 4 * self._dim)
        if self._held > self._memory_bytes:
            self._spill()

    def finish(self, path: Path) -> TableFile:
        """Writes the table.

        Args:
            path: path of the file, which must not exist.

        Raises:
            ValueError: an id was added twice.
            OSError: the file can't be written.
        """
        blocks, buckets = geometry_of(self._entries)
        unit = row_formats.unit_for(self._largest)
        made = TableFile(
            path.name, self._entries, blocks, buckets, self._dim, self._format, unit, (0, 0)
        )
        index_crc32 = rows_crc32 = 0
        block, row = 0, 0
        with open(path, "xb") as file:
            file.truncate(made.num_bytes)
            for records, chosen, end in self._by_blocks(blocks):
                index, order = _ops.serving_place(
                    _ids_of(records).index_select(0, chosen),
                    None,
                    blocks,
                    buckets,
                    block,
                    end - block,
                    row,
                )
                index_crc32 = _write(
                    file, block * buckets * _BUCKET_BYTES, index.numpy(), index_crc32
                )
                for part in chosen.index_select(0, order).split(max(1, _CONVERTED // self._dim)):
                    data = self._converted(records.index_select(0, part), unit)
                    rows_at = made.rows_at + row * made.row_bytes
                    rows_crc32 = _write(file, rows_at, data, rows_crc32)
                    row += part.numel()
                block = end
            file.flush()
            os.fsync(file.fileno())
        if self._spilled is not None:
            self._spilled.cleanup()
        return dataclasses.replace(made, crc32=(index_crc32, rows_crc32))

    def _converted(self, records: Tensor, unit: float) -> numpy.ndarray:
        rows = records[:, 2:].view(torch.float32)
        return row_formats.to_bytes(rows, self._format, unit).numpy()

    def _by_blocks(self, blocks: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields records, the numbers of those that are in the next blocks, and the number of the
        block after these."""
        if self._spilled is None:
            records = self._in_memory()
            yield records, torch.arange(records.shape[0]), blocks
            return
        self._spill()
        left = self._in_memory()
        for part in range(_SPILLED_PARTS):
            records = self._read_part(part, left)
            end = (part + 1) * blocks // _SPILLED_PARTS
            is_whole = _ops.serving_blocks(_ids_of(records), blocks) < end
            yield records, is_whole.nonzero().flatten(), end
            left = records.index_select(0, (~is_whole).nonzero().flatten())

    def _in_memory(self) -> Tensor:
        return torch.cat([torch.empty(0, 2 + self._dim, dtype=torch.int32), *self._records])

    def _spill(self) -> None:
        """Moves the entries in memory to files, one for each range of blocks."""
        if self._spilled is None:
            self._spilled = TemporaryDirectory(prefix=".parts-", dir=self._folder)
        records = self._in_memory()
        self._records, self._held = [], 0
        parts = _ops.serving_blocks(_ids_of(records), _SPILLED_PARTS)
        order = parts.argsort()
        counts = parts.bincount(minlength=_SPILLED_PARTS).tolist()
        for part, its in enumerate(order.split(counts)):
            with open(self._part(part), "ab") as file:
                file.write(records.index_select(0, its).numpy())

    def _read_part(self, part: int, left: Tensor) -> Tensor:
        """Records that were left, and then those of a file."""
        path, begin = self._part(part), left.shape[0]
        size = path.stat().st_size // (4 * (2 + self._dim))
        records = torch.empty(begin + size, 2 + self._dim, dtype=torch.int32)
        records[:begin] = left
        if size:
            with open(path, "rb") as file:
                if file.readinto(records[begin:].view(torch.uint8).numpy()) != path.stat().st_size:
                    raise OSError(f"{path} was cut short")
        return records

    def _part(self, part: int) -> Path:
        return Path(self._spilled.name) / str(part)


def _ids_of(records: Tensor) -> Tensor:
    return records[:, :2].contiguous().view(torch.int64).flatten()


def _write(file, at: int, data, crc32: int) -> int:
    file.seek(at)
    file.write(data)
    return zlib.crc32(data, crc32)


def build_layer(ids: Tensor, data: Tensor, erased: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Builds the index and the rows of a few ids in memory.

    Args:
        ids: int64 ``[n]``, distinct.
        data: uint8 ``[n, row_bytes]``.
        erased: bool ``[n]``, the ids that have no row even if a lower layer has one. None: no id.

    Returns:
        As :meth:`TableFile.map`.
    """
    index, order = place_layer(ids, erased)
    return index, data.index_select(0, order)


def place_layer(ids: Tensor, erased: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like :func:`build_layer`, but returns the order of the rows instead: int64 ``[n]``, the
    number of each row in ``ids``."""
    blocks, buckets = geometry_of(ids.numel())
    return _ops.serving_place(ids, erased, blocks, buckets, 0, blocks, 0)
