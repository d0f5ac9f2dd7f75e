"""Admission counters as bytes, and how counters of several tables are combined.

``csrc/hash_table/admission.h`` defines the layout.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import (
    SET_ENTRIES,
    Admission,
    MinFrequency,
    admission_bytes,
)
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.routing import owner_rank

#: Bytes of a cell: the id, its count and its step.
CELL_BYTES = 16
#: Bytes of a set: the cells in which an id can be counted.
SET_BYTES = SET_ENTRIES * CELL_BYTES
_LOW = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a table's admission counters.

    Attributes:
        name: ``"cells"`` or ``"sketch"``.
        cell_bits: bits of a cell.
        bytes: bytes of all counters.
    """

    name: str
    cell_bits: int
    bytes: int

    @property
    def limit(self) -> int:
        """The largest count of a sketch's cell."""
        return (1 << self.cell_bits) - 1

    def numbers(self, piece: Tensor) -> Tensor:
        """Unpacks cells of a sketch: int32 from uint8 bytes."""
        cells = piece if self.cell_bits == 8 else piece.view(torch.int16)
        return cells.to(torch.int32) & self.limit

    def packed(self, numbers: Tensor) -> Tensor:
        """Packs cells of a sketch: uint8 bytes from int32."""
        if self.cell_bits == 8:
            return numbers.to(torch.uint8)
        signed = torch.where(numbers >= 1 << 15, numbers - (1 << 16), numbers)
        return signed.to(torch.int16).view(torch.uint8)


def kind_of(admission: Admission | None) -> Kind | None:
    """The kind of counters for an admission rule; None if it does not count."""
    if not isinstance(admission, MinFrequency):
        return None
    if admission.entries is not None:
        return Kind("cells", 8 * CELL_BYTES, admission_bytes(admission))
    return Kind("sketch", 8 if admission.count <= 255 else 16, admission_bytes(admission))


def cells_in(counts: Tensor, owners: tuple[int, int]) -> Tensor:
    """The occupied cells whose ids have these owners.

    Args:
        counts: uint8, whole cells, on the CPU.
        owners: range ``[first, end)`` of owner buckets.

    Returns:
        int64 ``[n, 2]``: ids, and their counts and steps.
    """
    cells = counts.view(torch.int64).view(-1, 2)
    cells = cells[cells[:, 1] != 0]
    owner = owner_rank(cells[:, 0], OWNERS)
    return cells[(owner >= owners[0]) & (owner < owners[1])]


def placed_cells(cells: Tensor, sets: Tensor, begin: int, end: int) -> Tensor:
    """Places cells in their sets. If more cells than fit fall into a set, the highest counts stay.

    Args:
        cells: int64 ``[n, 2]``.
        sets: int64 ``[n]``, see :func:`set_of`.
        begin: first set.
        end: one past the last set.

    Returns:
        uint8, the bytes of these sets.
    """
    out = torch.zeros((end - begin) * SET_ENTRIES, 2, dtype=torch.int64)
    count = (cells[:, 1] & _LOW).clamp(max=0x7FFFFFFF)
    rank = count << 32 | (cells[:, 1] >> 32 & _LOW)
    order = rank.argsort(descending=True, stable=True)
    order = order[sets[order].argsort(stable=True)]
    cells, sets = cells[order], sets[order]
    place = torch.arange(len(sets)) - torch.searchsorted(sets, sets)
    fits = place < SET_ENTRIES
    out[((sets - begin) * SET_ENTRIES + place)[fits]] = cells[fits]
    return out.view(-1).view(torch.uint8)


def set_of(ids: Tensor, num_sets: int) -> Tensor:
    """The set of cells in which an id is counted."""
    return ((mix64(ids ^ _signed(0xBB67AE8584CAA73B)) >> 32 & _LOW) * num_sets) >> 32


def mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 (``csrc/common/hashing.h``)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
