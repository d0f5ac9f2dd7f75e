"""Batches of a click log for one rank, in an order that depends on the seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from click_data import ClickLog
from click_model import Variant
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: Indices of rows of a log: a range, or int64 ``[n]``.
Rows = range | torch.Tensor


def numbers(rows: Rows) -> torch.Tensor:
    """Converts row indices to int64 ``[n]``."""
    return torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


@dataclasses.dataclass(frozen=True)
class ClickBatch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    #: False for rows that pad the last batch.
    real: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """Moves the batch to a device."""
        return ClickBatch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            real=self.real.to(device, non_blocking=non_blocking),
        )


class ClickBatches:
    """One rank's part of a log, with ids encoded for a variant's tables.

    Rows of a global batch are distributed in turn, so that all ranks have the same number of rows.
    """

    def __init__(
        self, log: ClickLog, variant: Variant, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.labels = torch.from_numpy(log.labels)
        self.dense = torch.from_numpy(log.dense)
        self.names = [column.name for column in log.columns]
        self.ids = torch.stack([variant.encode(column) for column in log.columns])
        self.present = torch.stack([torch.from_numpy(column.present) for column in log.columns])
        self.device = device
        self.rank = rank
        self.world_size = world_size

    def shuffled(self, rows: Rows, batch_size: int, seed: int) -> Iterator[ClickBatch]:
        """Yields full global batches in random order; omits rows that do not fill a batch."""
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        for batch in numbers(rows)[order].split(batch_size):
            if len(batch) == batch_size:
                yield self.make(batch, torch.ones(batch_size, dtype=torch.bool))

    def in_order(self, rows: Rows, batch_size: int) -> Iterator[ClickBatch]:
        """Yields all rows in order; pads the last batch."""
        for start in range(0, len(rows), batch_size):
            batch = torch.arange(start, start + batch_size)
            yield self.make(numbers(rows)[batch.clamp(max=len(rows) - 1)], batch < len(rows))

    def make(self, rows: torch.Tensor, real: torch.Tensor) -> ClickBatch:
        rows, real = rows[self.rank :: self.world_size], real[self.rank :: self.world_size]
        present = self.present[:, rows]
        sparse = KeyedJaggedTensor.from_lengths_sync(
            keys=self.names,
            values=self.ids[:, rows][present],
            lengths=present.to(torch.int32).flatten(),
        )
        return ClickBatch(
            dense=self.dense[rows].to(self.device),
            sparse=sparse.to(self.device),
            labels=self.labels[rows].to(self.device),
            real=real.to(self.device),
        )
