"""Admission counters in a ``state_dict``, with sizes that do not depend on the number of ranks.

The counters of a table have the same size on each of its row shards. The state has space for the
counters of :data:`MAX_SHARDS` row shards. Each shard owns a whole number of these parts and stores
its counters in the first. With more shards than that, some own no part; their counters are not
saved and start from zero after a load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv.backends.protocol import TableShard, TensorSpec
from torchrec_hkv.backends.save_types import COUNTS
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

#: Number of row shards whose counters fit in a state.
MAX_SHARDS = 8


def counts_name(kind: Kind) -> str:
    """Name of the tensor in a state."""
    return f"{COUNTS}{kind.name}_{kind.cell_bits}"


def counts_spec(shard: TableShard, admission: Admission | None) -> dict[str, TensorSpec]:
    """The tensor of a shard; empty if the table counts nothing or the shard owns no part."""
    kind = kind_of(admission)
    rows = shard.num_embeddings

    def at(row: int) -> int:
        return (2 * row * MAX_SHARDS + rows) // (2 * rows)  # the nearest

    if kind is None:
        return {}
    parts = at(shard.row_offset + shard.capacity) - at(shard.row_offset)
    if parts == 0:
        return {}
    return {counts_name(kind): TensorSpec((parts * kind.bytes,), torch.uint8)}


def export_counts(group: TableGroup, table: int, spec: TensorSpec) -> Tensor:
    """A copy of a table's counters, as a tensor of :func:`counts_spec`."""
    counts = group.read_admission(table, 0, kind_of(group.tables[table].admission).bytes)
    exported = torch.zeros(spec.shape, dtype=spec.dtype, device=counts.device)
    exported[: len(counts)] = counts
    return exported


class CountsLoad:
    """Loads saved counters, from any sharding, into a table whose counters are empty.

    A cell belongs to an id and follows it. If more cells than fit fall into a set, the highest
    counts stay. Sketches have no ids: those of all shards are added, so that a count is never too
    low.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        owners: range ``[first, end)`` of owner buckets whose ids the table holds.
    """

    def __init__(self, group: TableGroup, table: int, owners: tuple[int, int]) -> None:
        self._group, self._table, self._owners = group, table, owners
        self._kind = kind_of(group.tables[table].admission)
        self._cells: list[Tensor] = []
        self._sum: Tensor | None = None

    @property
    def name(self) -> str | None:
        """Name of the tensor in a state; None if the table counts nothing."""
        return None if self._kind is None else counts_name(self._kind)

    def load_same(self, counts: Tensor) -> None:
        """Loads the counters of a shard with the same rows."""
        self._group.write_admission(self._table, 0, counts[: self._kind.bytes].contiguous())

    def put(self, first: int, part: Tensor) -> None:
        """Takes a part of a saved tensor, which begins and ends between sets of cells.

        Args:
            first: offset of the part in the shard's tensor, in bytes.
            part: uint8 ``[n]``.
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
        """Writes the counters taken so far into the table."""
        if self._cells:
            cells, num_sets = torch.cat(self._cells), self._kind.bytes // SET_BYTES
            counts = placed_cells(cells, set_of(cells[:, 0], num_sets), 0, num_sets)
        elif self._sum is not None:
            counts = self._kind.packed(self._sum)
        else:
            return
        self._group.write_admission(self._table, 0, counts)
