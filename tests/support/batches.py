"""Random batches of ids in CSR form, for tests of the hash table."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.stored_rows import numbers_of

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def random_ids(n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws ids from the whole int64 range, int64 ``[n]``."""
    return torch.randint(INT64_MIN, INT64_MAX, (n,), generator=generator)


@dataclasses.dataclass
class Bags:
    """A batch on one device.

    Attributes:
        ids: int64 ``[n]``.
        offsets: int64 ``[features * batch_size + 1]``.
        batch_size: number of bags per feature.
    """

    ids: Tensor
    offsets: Tensor
    batch_size: int

    @staticmethod
    def random(features: int, batch_size: int, pool: Tensor, longest: int = 5) -> Bags:
        """Draws bags of 0 to ``longest`` ids from ``pool`` with repetition."""
        lengths = torch.randint(0, longest + 1, (features * batch_size,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        ids = pool[torch.randint(0, len(pool), (int(offsets[-1]),))]
        return Bags(ids, offsets, batch_size)

    @staticmethod
    def flat(ids: Tensor) -> Bags:
        """Creates a batch with one feature and one bag of all ids."""
        ids = ids.contiguous()
        return Bags(ids, torch.tensor([0, ids.numel()], device=ids.device), 1)

    def to(self, device: str) -> Bags:
        """Copies the batch to another device."""
        return Bags(self.ids.to(device), self.offsets.to(device), self.batch_size)

    def feature(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns ids and offsets (from 0) of one feature."""
        bounds = self.offsets[index * self.batch_size : (index + 1) * self.batch_size + 1]
        return self.ids[bounds[0] : bounds[-1]], bounds - bounds[0]


def insert(group: TableGroup, bags: Bags) -> Tensor:
    """Returns slots after a training lookup; rows are not pinned afterwards."""
    return group.find_or_insert(bags.ids, bags.offsets, bags.batch_size)


def find(group: TableGroup, bags: Bags) -> Tensor:
    """Returns slots, -1 for ids that are not in their table."""
    return group.find(bags.ids, bags.offsets, bags.batch_size)


def lookup(
    group: TableGroup,
    bags: Bags,
    weights: Tensor | None = None,
    mean: bool = False,
    learning_rate: float = 0.1,
) -> Tensor:
    """Runs a training lookup like the backend."""
    anchor = torch.empty(0, device=bags.ids.device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(bags.ids, bags.offsets, bags.batch_size, pin)
    return group.pooled_lookup(
        anchor,
        bags.ids,
        bags.offsets,
        weights,
        slots,
        bags.batch_size,
        mean,
        pin,
        rate(learning_rate, group),
    )


def rate(learning_rate: float, group: TableGroup) -> Tensor:
    """Returns a learning rate as a tensor for a group."""
    return torch.full((), learning_rate, dtype=torch.float32, device=group.device)


def rows_by_id(group: TableGroup, table: int = 0) -> dict[int, Tensor]:
    """Returns a table's rows by id, on the CPU."""
    state = group.export_table(table)
    occupied = state.occupied.cpu()
    ids = state.ids.cpu()[occupied].tolist()
    rows = numbers_of(state.rows.cpu()[occupied], group.tables[table].dim)
    return dict(zip(ids, rows, strict=True))
