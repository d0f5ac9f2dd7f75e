"""The parts of a manifest: shards, counts, a delta, and reduced entries."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One file of entries.

    Attributes:
        file: name of the file.
        owner_begin: first owner bucket of its ids.
        owner_end: one past its last owner bucket.
        entries: number of entries.
        bytes: size of the file. For a compressed file, whose name ends with ``.zst``, its
            uncompressed size.
        crc32: checksum of each tensor's bytes.
    """

    file: str
    owner_begin: int
    owner_end: int
    entries: int
    bytes: int
    crc32: dict[str, int]


@dataclasses.dataclass(frozen=True)
class CountsFile:
    """The file of the admission counters.

    Attributes:
        file: name of the file.
        kind: ``"cells"`` or ``"sketch"``.
        cell_bits: bits of a cell.
        bytes: size of the file.
        crc32: checksum of the file.
    """

    file: str
    kind: str
    cell_bits: int
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class DeltaContent:
    """Description of a folder that holds only what changed in a table since an earlier save.

    Attributes:
        entries: number of entries in the table.
        left_file: name of the file of slots that held other ids before, with these ids.
        left: number of pairs in this file.
        left_crc32: checksum of this file.
    """

    entries: int
    left_file: str
    left: int
    left_crc32: int


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Description of a folder that holds entries in a reduced form.

    Attributes:
        dtype: dtype of the rows in the shards; int8 for codes with a scale per row.
        states: whether the shards hold optimizer states.
    """

    dtype: str
    states: bool


def reduced_of(dtype: torch.dtype, states: bool, row_dtype: torch.dtype | None) -> Reduced | None:
    """The reduced form of a table's entries, or None if they are complete."""
    saved = dtype if row_dtype is None or dtype.itemsize <= row_dtype.itemsize else row_dtype
    if states and saved == dtype:
        return None
    return Reduced(str(saved).removeprefix("torch."), states)
