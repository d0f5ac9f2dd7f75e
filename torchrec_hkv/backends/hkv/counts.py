"""Counts of ids that are not admitted, in a ``state_dict``: of the same size over any ranks.

A table's counts are as large on each of its shards of rows. So that sizes don't depend on the
ranks, a state has room for those of :data:`MOST_SHARDS` shards, which its shards share in whole
rooms; each puts its counts into its first one. A shard without a room, of more than so many, leaves
its counts out: they start anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv.backends.protocol import TableShard, TensorSpec
from torchrec_hkv.backends.saved import COUNTS
from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.files.counts import (
    SET_BYTES,
    Kind,
    cells_in,
    kind_of,
    placed_cells,
    set_of,
)

#: Shards of rows whose counts a state has room for.
MOST_SHARDS = 8


def counts_name(kind: Kind) -> str:
    """Of the tensor in a state."""
    return f"{COUNTS}{kind.name}_{kind.cell_bits}"


def counts_spec(shard: TableShard, admission: Admission | None) -> dict[str, TensorSpec]:
    """The tensor of a shard of the first column; none where nothing is counted, or without room."""
    kind = kind_of(admission)
    rows = shard.num_embeddings

    def at(row: int) -> int:
        return (2 * row * MOST_SHARDS + rows) // (2 * rows)  # the nearest

    if kind is None:
        return {}
    rooms = at(shard.row_offset + shard.capacity) - at(shard.row_offset)
    if rooms == 0:
        return {}
    return {counts_name(kind): TensorSpec((rooms * kind.bytes,), torch.uint8)}


def export_counts(group: TableGroup, table: int, spec: TensorSpec) -> Tensor:
    """A copy of a table's counts, as :func:`counts_spec` says."""
    counts = group.read_admission(table, 0, kind_of(group.tables[table].admission).bytes)
    exported = torch.zeros(spec.shape, dtype=spec.dtype, device=counts.device)
    exported[: len(counts)] = counts
    return exported


class CountsLoad:
    """Gives a table whose counts are empty those of a saved one, whatever its shards were.

    Cells go with their ids; where more come to a set than it has, the highest counts stay. Sketches
    hold no ids: those of all shards are added up, so that a count is never too low.

    Args:
        group: the table's.
        table: its index there.
        owners: first owner bucket of the ids that the table is asked for, and the one past the
            last.
    """

    def __init__(self, group: TableGroup, table: int, owners: tuple[int, int]) -> None:
        self._group, self._table, self._owners = group, table, owners
        self._kind = kind_of(group.tables[table].admission)
        self._cells: list[Tensor] = []
        self._sum: Tensor | None = None

    @property
    def name(self) -> str | None:
        """Of the tensor in a state; None where the table counts nothing."""
        return None if self._kind is None else counts_name(self._kind)

    def load_same(self, counts: Tensor) -> None:
        """Takes the counts of a shard of the same rows as they are."""
        self._group.write_admission(self._table, 0, counts[: self._kind.bytes].contiguous())

    def put(self, first: int, part: Tensor) -> None:
        """Takes a part of a state's tensor, in whole sets of cells.

        Args:
            first: its first byte in a shard's tensor.
            part: uint8.
        """
        if self._kind.name == "cells":
            self._cells.append(cells_in(part.cpu(), self._owners))
            return
        size = 8 * self._kind.bytes // self._kind.cell_bits
        if self._sum is None:
            self._sum = torch.zeros(size, dtype=torch.int32)
        added = self._kind.numbers(part.cpu())
        place = (8 * first // self._kind.cell_bits + torch.arange(len(added))) % size
        self._sum.index_add_(0, place, added)
        self._sum.clamp_(max=self._kind.limit)

    def finish(self) -> None:
        """Writes what was taken."""
        if self._cells:
            cells, num_sets = torch.cat(self._cells), self._kind.bytes // SET_BYTES
            counts = placed_cells(cells, set_of(cells[:, 0], num_sets), 0, num_sets)
        elif self._sum is not None:
            counts = self._kind.packed(self._sum)
        else:
            return
        self._group.write_admission(self._table, 0, counts)
