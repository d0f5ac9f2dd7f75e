"""Builds the file of a read-only table from ids and rows in any order, in bounded memory.

Rows are converted to the table's format as they arrive, and kept until all ids are known. Quantised
rows are converted with the unit for the largest value so far. If a later row needs a larger unit,
scales and offsets of earlier rows are divided by a power of two. They then equal the result with
the larger unit, unless they leave the normal numbers of float16. In this case all rows must be
given again, to a builder that knows the largest value.

Files of checkpoints hold ranges of owners, which are also ranges of blocks. A block is written as
soon as all of its ids are known, so that memory holds about one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.background_file import BackgroundFile, FileStream
from torchrec_hkv.serving.row_formats import RowFormat
from torchrec_hkv.serving.table_file import TableFile
from torchrec_hkv.serving.table_writer import TableWriter, doublings, gather_rows

_ops = torch.ops.torchrec_hkv
#: Default memory of a builder for ids and rows, in bytes. Further entries go to a file, sorted by
#: ranges of blocks.
MEMORY_BYTES = 1 << 30
# Bytes of an entry's id, and of its number in an order.
_ENTRY_BYTES = 16
_SPILLED_PARTS = 256
_BLOCKS_AT_A_TIME = 8
#: Number of owner buckets.
OWNERS = 1 << 16

#: Known properties of the order in which entries are added: pairs (number of entries, owner
#: bucket). After this number of entries, all ids of lower owner buckets have been added. Ascending;
#: the last pair is for all entries.
Order = Sequence[tuple[int, int]]

#: Ids of the next blocks, rows, the indices of these ids' rows, and the end of the blocks.
_Chosen = tuple[Tensor, Tensor, Tensor, int]


@dataclasses.dataclass(frozen=True)
class _Spill:
    """Entries in the temporary file. Each part has its ids first, then its rows.

    Attributes:
        unit: unit of the rows.
        starts: offsets in the file of each part, and of the end.
        counts: entries of each part.
    """

    unit: float
    starts: list[int]
    counts: list[int]


class TableBuilder:
    """A context manager that builds a table from ids and rows in any order.

    Args:
        dim: columns of the rows.
        row_format: row format of the table.
        folder: folder of a temporary file for ids and rows that don't fit in ``memory_bytes``.
        memory_bytes: memory for ids and rows, in bytes. Buffers, and the entries of one of 256
            parts of the temporary file, take additional memory.
        largest: largest known absolute value of all rows.
        order: the order of the entries; empty if it is unknown.
    """

    def __init__(
        self,
        dim: int,
        row_format: RowFormat,
        folder: Path,
        memory_bytes: int = MEMORY_BYTES,
        largest: float = 0.0,
        order: Order = (),
    ) -> None:
        self._dim, self._format, self._folder = dim, row_format, folder
        self._row_bytes = row_formats.row_bytes(row_format, dim)
        self._capacity = max(1, memory_bytes // (_ENTRY_BYTES + self._row_bytes))
        self._ids = _ops.serving_memory(8 * self._capacity).view(torch.int64)
        memory = _ops.serving_memory(self._row_bytes * self._capacity)
        self._rows = memory.view(self._capacity, self._row_bytes)
        self._num_buffered = self._entries = 0
        self._largest = largest
        # Number of times that the unit can be doubled: see row_formats.quantise_into.
        self._doublings_left = row_formats.MAX_DOUBLINGS
        self._is_void = False
        self._spills: list[_Spill] = []
        self._scratch: TemporaryDirectory[str] | None = None
        self._file: BackgroundFile | None = None
        self._stream: FileStream | None = None
        self._order = order
        self._writer: TableWriter | None = None

    @property
    def largest_if_void(self) -> float | None:
        """None, or the largest value of the rows if all rows must be given again, to a new builder
        that gets this value."""
        return self._largest if self._is_void else None

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Adds entries.

        Args:
            ids: int64 ``[n]``, without duplicates over all calls.
            rows: float32 ``[n, dim]``.

        Raises:
            ValueError: the format is quantised and a row is not finite, an id was added twice, or
                the entries have another order.
            OSError: a file can't be written.
        """
        if ids.numel() == 0:
            return
        ids, rows = ids.contiguous(), rows.float().contiguous()
        if self._is_quantised and (self._entries == 0 or self._is_void):
            self._grow(row_formats.largest_of(rows), ids, rows)
        self._entries += ids.numel()
        first = 0
        while first < ids.numel() and not self._is_void:
            if self._num_buffered == self._capacity:
                self._spill()
            n = min(ids.numel() - first, self._capacity - self._num_buffered)
            n = self._convert(ids[first : first + n], rows[first : first + n])
            self._ids[self._num_buffered : self._num_buffered + n] = ids[first : first + n]
            self._num_buffered += n
            first += n
        reached = [owner for entries, owner in self._order if entries <= self._entries]
        if reached and not self._is_void:
            self._write_whole_blocks(max(reached))

    def finish(self, path: Path) -> TableFile:
        """Writes the table.

        Args:
            path: path of the file, which must not exist.

        Raises:
            ValueError: an id was added twice, or all rows must be given :attr:`largest_if_void`.
            OSError: the file can't be written.
        """
        if self._is_void:
            raise ValueError(
                f"the largest value of the table is {self._largest}, which the first rows were not "
                "converted for: give all rows again."
            )
        writer = self._writer or TableWriter(path, self._entries, self._dim, self._format)
        with contextlib.closing(writer):
            for ids, rows, chosen, end in self._by_blocks(writer.block, writer.blocks):
                writer.write(ids, rows, chosen, end, self._unit)
            if not writer.rows == writer.entries == self._entries:
                raise _other_order()
            table_file = writer.finish(self._unit)
        if self._writer is not None:
            (Path(self._scratch.name) / table_file.file).rename(path)
        self.close()
        return dataclasses.replace(table_file, file=path.name)

    def close(self) -> None:
        """Removes temporary files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def __enter__(self) -> TableBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_quantised(self) -> bool:
        return self._format in row_formats.LEVELS

    @property
    def _unit(self) -> float:
        return row_formats.unit_for(self._largest)

    def _convert(self, ids: Tensor, rows: Tensor) -> int:
        """Converts rows and appends them in memory. Returns the number of converted rows, which is
        less than all if the next row needs a larger unit."""
        out = self._rows[self._num_buffered : self._num_buffered + rows.shape[0]]
        if not self._is_quantised:
            row_formats.convert_into(rows, self._format, out)
            return rows.shape[0]
        done = row_formats.quantise_into(rows, self._format, self._largest, out)
        self._doublings_left = min(self._doublings_left, done.doublings_left)
        if done.rows < rows.shape[0]:
            self._grow(done.largest, ids[done.rows :], rows[done.rows :], done.rows)
        return done.rows

    def _grow(self, largest: float, ids: Tensor, rows: Tensor, converted: int = 0) -> None:
        """Raises the largest value to that of ``rows``, and converts the rows before them to its
        unit; ``converted`` of those are not counted yet."""
        if not math.isfinite(largest):
            bad = ids[~rows.isfinite().all(dim=1)][0]
            raise ValueError(
                f"the row of id {int(bad)} is not finite, and can't be written as {self._format}: "
                "leave its table as it is."
            )
        before, had_values = self._unit, self._largest > 0.0
        self._largest = max(self._largest, largest)
        if self._is_void or not had_values or self._entries == 0:
            return
        count = doublings(before, self._unit)
        if count > self._doublings_left:
            self._is_void = True
            self.close()
            return
        self._doublings_left -= count
        _ops.serving_lower(self._rows[: self._num_buffered + converted], count)

    def _write_whole_blocks(self, owner: int) -> None:
        """Writes the blocks whose ids all have owner buckets below ``owner``."""
        if self._spills:
            return  # the rest is written at the end
        if self._writer is None:
            path = self._temporary() / "table"
            self._writer = TableWriter(path, self._order[-1][0], self._dim, self._format)
        writer = self._writer
        end = owner * writer.blocks // OWNERS
        if end <= writer.block:
            return
        ids, rows = self._ids[: self._num_buffered], self._rows[: self._num_buffered]
        order, by_block, counts = _ops.serving_split(ids, writer.blocks)
        ends = [0, *counts.cumsum(0).tolist()]
        if ends[writer.block] > 0:
            raise _other_order()
        for block in range(writer.block, end, _BLOCKS_AT_A_TIME):
            stop = min(block + _BLOCKS_AT_A_TIME, end)
            chosen = slice(ends[block], ends[stop])
            writer.write(by_block[chosen], rows, order[chosen], stop, self._unit)
        remaining = order[ends[end] :].sort().values
        remaining_ids, remaining_rows = (
            ids.index_select(0, remaining),
            rows.index_select(0, remaining),
        )
        self._num_buffered = remaining.numel()
        self._ids[: self._num_buffered], self._rows[: self._num_buffered] = (
            remaining_ids,
            remaining_rows,
        )

    def _by_blocks(self, first: int, blocks: int) -> Iterator[_Chosen]:
        """The entries of the blocks from ``first`` on."""
        ids, rows = self._ids[: self._num_buffered], self._rows[: self._num_buffered]
        if not self._spills:
            order, by_block, counts = _ops.serving_split(ids, blocks)
            ends = [0, *counts.cumsum(0).tolist()]
            for block in range(first, blocks, _BLOCKS_AT_A_TIME):
                end = min(block + _BLOCKS_AT_A_TIME, blocks)
                chosen = slice(ends[block], ends[end])
                yield by_block[chosen], rows, order[chosen], end
            return
        self._stream.finish()
        order, _, counts = _ops.serving_split(ids, _SPILLED_PARTS)
        block_entries = order.split(counts.tolist())
        remaining_ids, remaining_rows = ids[:0], rows[:0]
        for part in range(_SPILLED_PARTS):
            part_ids, part_rows = self._part(
                part, remaining_ids, remaining_rows, block_entries[part]
            )
            end = (part + 1) * blocks // _SPILLED_PARTS
            is_complete = _ops.serving_blocks(part_ids, blocks) < end
            if end > first:
                complete = is_complete.nonzero().flatten()
                yield part_ids[complete], part_rows, complete, end
            remaining = (~is_complete).nonzero().flatten()
            remaining_ids, remaining_rows = part_ids[remaining], part_rows[remaining]

    def _temporary(self) -> Path:
        """The folder of temporary files."""
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix=".parts-", dir=self._folder)
        return Path(self._scratch.name)

    def _spill(self) -> None:
        """Moves the entries in memory to the temporary file, sorted by parts."""
        if self._file is None:
            self._file = BackgroundFile(
                self._temporary() / "entries", self._ids.nbytes + self._rows.nbytes
            )
            self._stream = self._file.stream(0)
        order, ids, counts = _ops.serving_split(self._ids[: self._num_buffered], _SPILLED_PARTS)
        starts = [self._stream.end]
        of_parts = counts.tolist()
        for part_order, part_ids in zip(order.split(of_parts), ids.split(of_parts), strict=True):
            if part_order.numel() > 0:
                self._stream.append(part_ids.view(torch.uint8))
                gather_rows(self._rows, part_order, self._stream)
            starts.append(self._stream.end)
        self._spills.append(_Spill(self._unit, starts, counts.tolist()))
        self._num_buffered = 0

    def _part(
        self, part: int, remaining_ids: Tensor, remaining_rows: Tensor, block_entries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids and rows of a part: first the remaining entries of the previous part, then the others
        in the order in which they were added."""
        at = remaining_ids.numel()
        total = at + sum(spill.counts[part] for spill in self._spills) + block_entries.numel()
        ids = torch.empty(total, dtype=torch.int64)
        rows = torch.empty(total, self._row_bytes, dtype=torch.uint8)
        ids[:at], rows[:at] = remaining_ids, remaining_rows
        for spill in self._spills:
            n, start = spill.counts[part], spill.starts[part]
            if n == 0:
                continue
            part_rows = rows[at : at + n]
            self._file.read(ids[at : at + n].view(torch.uint8), start)
            self._file.read(part_rows.flatten(), start + 8 * n)
            if self._is_quantised and spill.unit != self._unit:
                _ops.serving_lower(part_rows, doublings(spill.unit, self._unit))
            at += n
        torch.index_select(self._ids, 0, block_entries, out=ids[at:])
        _ops.serving_gather(self._rows, block_entries, rows[at:])
        return ids, rows


def _other_order() -> ValueError:
    return ValueError(
        "ids are in files of other owners than their own, or of another number: save the "
        "checkpoint again."
    )


def build_table(
    entries: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    dim: int,
    row_format: RowFormat,
    path: Path,
    memory_bytes: int = MEMORY_BYTES,
    order: Order = (),
) -> TableFile:
    """Builds a table.

    Args:
        entries: returns batches of ids and rows for :meth:`TableBuilder.add`. Called again if rows
            must be given again.
        dim: columns of the rows.
        row_format: row format of the table.
        path: path of the file, which must not exist.
        memory_bytes, order: as for :class:`TableBuilder`.

    Raises:
        ValueError: an id occurs twice, the format is quantised and a row is not finite, or the
            entries have another order.
        OSError: a file can't be written.
    """
    largest = 0.0
    while True:
        with TableBuilder(dim, row_format, path.parent, memory_bytes, largest, order) as builder:
            for ids, rows in entries():
                builder.add(ids, rows)
            if builder.largest_if_void is None:
                return builder.finish(path)
            largest = builder.largest_if_void
