"""Counts of ids that are not admitted, in files: written, checked, and moved between ranks.

Cells move with their ids: to another number of cells, and to the table that asks for the id. A
sketch holds no ids. Sketches of several ranks are added up, cell by cell, where their tables become
one, and a table that becomes several leaves its sketch to each: no count is ever too low.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import (
    SET_ENTRIES,
    MinFrequency,
    admission_bytes,
)
from torchrec_hkv.hash_table.block_files import host_memory
from torchrec_hkv.hash_table.manifest import OWNERS, Counts, counts_name
from torchrec_hkv.hash_table.ops import owner_rank
from torchrec_hkv.hash_table.table_group import TableGroup

#: Bytes of a cell: the id, and its count and step.
_CELL = 16
_SET = SET_ENTRIES * _CELL
_LOW = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class SavedCounts:
    """The counts of one part of a saved table.

    Attributes:
        folder: that holds the file.
        counts: what its manifest says.
        owners: first owner bucket of the ids that the part was asked for, and the one past the
            last.
    """

    folder: Path
    counts: Counts
    owners: tuple[int, int]


def kind_of(group: TableGroup, table: int) -> tuple[str, int, int] | None:
    """``"cells"`` or ``"sketch"``, bits of a cell, and bytes; None where nothing is counted."""
    admission = group.tables[table].admission
    if not isinstance(admission, MinFrequency):
        return None
    if admission.entries is not None:
        return "cells", 8 * _CELL, admission_bytes(admission)
    return "sketch", 8 if admission.count <= 255 else 16, admission_bytes(admission)


def write_counts(
    group: TableGroup, table: int, folder: Path, save: str, batch_bytes: int
) -> Counts | None:
    """Writes the counts of a table to a file of its own; None where it counts nothing."""
    kind = kind_of(group, table)
    if kind is None:
        return None
    path = folder / counts_name(save)
    crc32 = 0
    with open(path, "xb") as file:
        for first, n in _pieces(kind[2], batch_bytes):
            piece = group.read_admission(table, first, n).cpu()
            data = host_memory(piece)
            crc32 = zlib.crc32(data, crc32)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Counts(path.name, *kind, crc32)


def verify_counts(folder: Path, counts: Counts, batch_bytes: int) -> None:
    """Reads a file of counts.

    Raises:
        ValueError: it is missing, of another size or damaged.
    """
    path = folder / counts.file
    crc32 = 0
    try:
        size = path.stat().st_size
        if size != counts.bytes:
            what = "cut short" if size < counts.bytes else "too long"
            raise ValueError(f"{path} is {what}: it has {size} bytes instead of {counts.bytes}.")
        for first, n in _pieces(counts.bytes, batch_bytes):
            piece = _read(path, first, n)
            crc32 = zlib.crc32(host_memory(piece), crc32)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if crc32 != counts.crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {crc32}, but the manifest names {counts.crc32}."
        )


def load_counts(
    group: TableGroup,
    table: int,
    saved: Sequence[SavedCounts],
    owners: tuple[int, int],
    batch_bytes: int,
) -> None:
    """Gives a table whose counts are empty those of saved parts.

    Nothing is done where the table counts in another way than they did, or in a sketch of another
    size: its counts start anew.

    Args:
        group: the table's.
        table: its index there.
        saved: parts whose owner buckets don't overlap.
        owners: first owner bucket of the ids that the table is asked for, and the one past the
            last.
        batch_bytes: host memory it may take.
    """
    kind = kind_of(group, table)
    if kind is None:
        return
    met = [
        part
        for part in saved
        if (part.counts.kind, part.counts.cell_bits) == kind[:2] and _overlap(part.owners, owners)
    ]
    if len(met) == 1 and met[0].counts.bytes == kind[2] and met[0].owners == owners:
        pieces = _copied(met[0], batch_bytes)
    elif kind[0] == "cells":
        pieces = _moved_cells(met, owners, kind[2], batch_bytes)
    elif met and all(part.counts.bytes == kind[2] for part in met):
        pieces = _added_sketches(met, kind[1], kind[2], batch_bytes)
    else:
        return
    for first, piece in pieces:
        group.write_admission(table, first, piece)


def _pieces(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Where pieces of whole sets begin, and their bytes."""
    most = max(_SET, most // _SET * _SET)
    for first in range(0, size, most):
        yield first, min(most, size - first)


def _read(path: Path, first: int, n: int) -> Tensor:
    out = torch.empty(n, dtype=torch.uint8)
    with open(path, "rb") as file:
        file.seek(first)
        if file.readinto(host_memory(out)) != n:
            raise ValueError(f"{path} is cut short: it ends before byte {first + n}.")
    return out


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _copied(part: SavedCounts, batch_bytes: int) -> Iterator[tuple[int, Tensor]]:
    for first, n in _pieces(part.counts.bytes, batch_bytes):
        yield first, _read(part.folder / part.counts.file, first, n)


def _added_sketches(
    parts: Sequence[SavedCounts], bits: int, size: int, batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Sums that stop at the largest number of a cell, as counting does."""
    limit = (1 << bits) - 1
    # A piece is read once a part and summed in int32.
    for first, n in _pieces(size, batch_bytes // (8 if bits == 8 else 6)):
        total = torch.zeros(8 * n // bits, dtype=torch.int32)
        for part in parts:
            piece = _read(part.folder / part.counts.file, first, n)
            cells = piece if bits == 8 else piece.view(torch.int16)
            total += cells.to(torch.int32) & limit
            total.clamp_(max=limit)
        if bits == 16:
            total = torch.where(total >= 1 << 15, total - (1 << 16), total)
        yield first, total.to(torch.uint8 if bits == 8 else torch.int16).view(torch.uint8)


def _moved_cells(
    parts: Sequence[SavedCounts], owners: tuple[int, int], size: int, batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Each cell to its id's set; of more than a set holds, the highest counts stay."""
    num_sets = size // _SET
    # Sets that lie together hold a range of hashes, in tables of any size.
    for first, n in _pieces(size, batch_bytes // 12):
        begin, end = first // _SET, (first + n) // _SET
        found = [_cells_of(part, begin, end, num_sets, owners) for part in parts]
        out = torch.zeros((end - begin) * SET_ENTRIES, 2, dtype=torch.int64)
        if found:
            cells, sets = (torch.cat(column) for column in zip(*found, strict=True))
            count = (cells[:, 1] & _LOW).clamp(max=0x7FFFFFFF)
            rank = count << 32 | (cells[:, 1] >> 32 & _LOW)
            order = rank.argsort(descending=True, stable=True)
            order = order[sets[order].argsort(stable=True)]
            cells, sets = cells[order], sets[order]
            place = torch.arange(len(sets)) - torch.searchsorted(sets, sets)
            fits = place < SET_ENTRIES
            out[((sets - begin) * SET_ENTRIES + place)[fits]] = cells[fits]
        yield first, out.view(-1).view(torch.uint8)


def _cells_of(
    part: SavedCounts, begin: int, end: int, num_sets: int, owners: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The cells of a file whose ids are in sets ``begin`` to ``end`` of ``num_sets``, and these."""
    own_sets = part.counts.bytes // _SET
    low = ((begin << 32) // num_sets * own_sets) >> 32
    high = min(own_sets, ((-(-(end << 32) // num_sets) * own_sets) >> 32) + 1)
    read = _read(part.folder / part.counts.file, low * _SET, (high - low) * _SET)
    cells = read.view(torch.int64).view(-1, 2)
    cells = cells[cells[:, 1] != 0]
    sets = set_of(cells[:, 0], num_sets)
    owner = owner_rank(cells[:, 0], OWNERS)
    mine = (sets >= begin) & (sets < end) & (owner >= owners[0]) & (owner < owners[1])
    return cells[mine], sets[mine]


def set_of(ids: Tensor, num_sets: int) -> Tensor:
    """The set of cells that an id is counted in (``csrc/hash_table/admission.h``)."""
    return ((mix64(ids ^ _signed(0xBB67AE8584CAA73B)) >> 32 & _LOW) * num_sets) >> 32


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 (``csrc/common/hashing.h``)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
