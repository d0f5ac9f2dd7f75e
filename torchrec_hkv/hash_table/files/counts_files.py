"""Admission counters in files: written, verified, and redistributed over ranks.

A cell goes to the table that holds its id, even if the number of cells differs. A sketch has no
ids: if the tables of several ranks become one, their sketches are added cell by cell; if one table
becomes several, each gets a copy of the sketch. A count is therefore never too low.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.hash_table.files.block_files import host_memory
from torchrec_hkv.hash_table.files.counts import (
    SET_BYTES,
    Kind,
    cells_in,
    kind_of,
    placed_cells,
    set_of,
)
from torchrec_hkv.hash_table.files.file_names import counts_name
from torchrec_hkv.hash_table.files.manifest_parts import CountsFile
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.write_behind import SaveHandle
from torchrec_hkv.write_behind_file import WriteBehindFile


@dataclasses.dataclass(frozen=True)
class SavedCounts:
    """The counters of one shard of a saved table.

    Attributes:
        folder: the folder of the file.
        counts: the manifest's description of the file.
        owners: range ``[first, end)`` of owner buckets whose ids the shard held.
    """

    folder: Path
    counts: CountsFile
    owners: tuple[int, int]


def write_counts(
    group: TableGroup,
    table: int,
    folder: Path,
    save: str,
    batch_bytes: int,
    handle: SaveHandle | None = None,
) -> Callable[[], CountsFile | None]:
    """Writes the admission counters of a table to a file.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        folder: folder for the file.
        save: 8 hexadecimal digits, unique for the save.
        batch_bytes: memory limit in bytes.
        handle: handle of a non-blocking save, whose threads write the file.

    Returns:
        A function that returns the description for the manifest, after the file is written. None if
        the table has no counters.
    """
    kind = kind_of(group.tables[table].admission)
    if kind is None:
        return lambda: None
    with WriteBehindFile(folder / counts_name(save), handle) as file:
        for first, n in _pieces(kind.bytes, batch_bytes):
            file.write(host_memory(group.read_admission(table, first, n).cpu()))
    return lambda: CountsFile(counts_name(save), kind.name, kind.cell_bits, kind.bytes, file.crc32)


def verify_counts(folder: Path, counts: CountsFile, batch_bytes: int) -> None:
    """Verifies a file of counters.

    Raises:
        ValueError: the file is missing, damaged or of another size.
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
            crc32 = checksums.crc32(host_memory(piece), crc32)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if crc32 != counts.crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {crc32}, but the manifest has {counts.crc32}."
        )


def load_counts(
    group: TableGroup,
    table: int,
    saved: Sequence[SavedCounts],
    owners: tuple[int, int],
    batch_bytes: int,
) -> None:
    """Loads saved counters into a table whose counters are empty.

    Nothing is loaded if the table counts in another way than the saved table, or in a sketch of
    another size.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        saved: saved shards with disjoint owner buckets.
        owners: range ``[first, end)`` of owner buckets whose ids the table holds.
        batch_bytes: host memory limit in bytes.
    """
    kind = kind_of(group.tables[table].admission)
    if kind is None:
        return
    overlapping = [
        part
        for part in saved
        if (part.counts.kind, part.counts.cell_bits) == (kind.name, kind.cell_bits)
        and _overlap(part.owners, owners)
    ]
    if (
        len(overlapping) == 1
        and overlapping[0].counts.bytes == kind.bytes
        and overlapping[0].owners == owners
    ):
        pieces = _copied(overlapping[0], batch_bytes)
    elif kind.name == "cells":
        pieces = _moved_cells(overlapping, owners, kind.bytes, batch_bytes)
    elif overlapping and all(part.counts.bytes == kind.bytes for part in overlapping):
        pieces = _added_sketches(overlapping, kind, batch_bytes)
    else:
        return
    for first, piece in pieces:
        group.write_admission(table, first, piece)


def _pieces(size: int, maximum: int) -> Iterator[tuple[int, int]]:
    """Splits ``size`` bytes into pieces of whole sets; yields offset and size of each."""
    maximum = max(SET_BYTES, maximum // SET_BYTES * SET_BYTES)
    for first in range(0, size, maximum):
        yield first, min(maximum, size - first)


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
    parts: Sequence[SavedCounts], kind: Kind, batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Adds sketches. Sums saturate at the largest count of a cell."""
    # For each piece, the files of all shards are read and added in int32.
    for first, n in _pieces(kind.bytes, batch_bytes // (8 if kind.cell_bits == 8 else 6)):
        total = torch.zeros(8 * n // kind.cell_bits, dtype=torch.int32)
        for part in parts:
            total += kind.numbers(_read(part.folder / part.counts.file, first, n))
            total.clamp_(max=kind.limit)
        yield first, kind.packed(total)


def _moved_cells(
    parts: Sequence[SavedCounts], owners: tuple[int, int], size: int, batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Moves each cell to the set of its id."""
    num_sets = size // SET_BYTES
    # Consecutive sets correspond to a range of hashes, in tables of any size.
    for first, n in _pieces(size, batch_bytes // 12):
        begin, end = first // SET_BYTES, (first + n) // SET_BYTES
        cells = [torch.empty(0, 2, dtype=torch.int64)]
        cells += [_cells_of(part, begin, end, num_sets, owners) for part in parts]
        found = torch.cat(cells)
        yield first, placed_cells(found, set_of(found[:, 0], num_sets), begin, end)


def _cells_of(
    part: SavedCounts, begin: int, end: int, num_sets: int, owners: tuple[int, int]
) -> Tensor:
    """The cells of a file whose ids belong to sets ``begin`` to ``end`` of ``num_sets``."""
    own_sets = part.counts.bytes // SET_BYTES
    low = ((begin << 32) // num_sets * own_sets) >> 32
    high = min(own_sets, ((-(-(end << 32) // num_sets) * own_sets) >> 32) + 1)
    read = _read(part.folder / part.counts.file, low * SET_BYTES, (high - low) * SET_BYTES)
    cells = cells_in(read, owners)
    sets = set_of(cells[:, 0], num_sets)
    return cells[(sets >= begin) & (sets < end)]
