"""A table that is loaded: entries of files become its entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.shard_files import Field, Staging
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.stored_rows import join_int8, stored_as

# Number of batches alive at a time in a load with another capacity: the batch that was read, the
# entries it displaces, and the entries those displace.
_COPIES = 3

_ops = torch.ops.torchrec_hkv


class FileTarget(FileTable):
    """A table that is loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        super().__init__(group, table, batch_bytes)
        self.capacity = group.full_slots(table)

    def staging(self, fields: Sequence[Field]) -> Staging:
        """Host memory for a batch of a file with these fields."""
        return Staging(fields, self._entries(_COPIES), pin=self.group.device.type == "cuda")

    def can_have(self, buckets: int, bucket_slots: int) -> bool:
        """Whether the table has this geometry, or can grow to it."""
        maximum = self.capacity // self.bucket_slots
        sizes = [self.buckets << k for k in range(64) if self.buckets << k <= maximum]
        return bucket_slots == self.bucket_slots and buckets in sizes

    def grow(self, manifest: Manifest, exact: bool) -> None:
        """Grows to the saved table's geometry if ``exact``, otherwise until all its entries fit."""
        if exact:
            self.group.reserve_buckets(self.table, manifest.buckets, manifest.bucket_slots)
        else:
            self.group.reserve(self.table, min(manifest.entries, self.capacity))

    def restore(self, batch: dict[str, Tensor], exact: bool) -> int:
        """Inserts entries; returns how many found no slot.

        Rows are numbers, or codes of 8 bits with ``scales``, or stored rows of the table. If the
        table stores counts and the entries have none, each entry gets the count 1.
        """
        slots, *entries = self._entries_of(batch)
        n = entries[0].numel()
        place = (self.group.counter_tensor, self.group.handle, self.table)
        self.group.note_restore()
        if exact:
            placed = _ops.restore_slots(*place, slots, *entries)
            return 0 if placed.all() else n - int(placed.sum())
        lost = 0
        while entries[0].numel():
            *displaced, counts = _ops.restore_entries(*place, *entries)
            again, refused = counts.tolist()
            lost += refused
            # A displaced entry may still find a slot in its other bucket.
            entries = [tensor[:again] for tensor in displaced]
        return lost

    def restore_batches(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """Inserts entries of several files into their own slots, which ascend in each batch;
        returns how many found no slot. For a table on a CPU."""
        self.group.note_restore()
        place = (self.group.counter_tensor, self.group.handle, self.table)
        tensors = zip(*(self._entries_of(batch) for batch in batches), strict=True)
        return _ops.restore_batches(*place, *map(list, tensors))

    def _entries_of(self, batch: dict[str, Tensor]) -> list[Any]:
        """Slots (if given), ids, rows, last steps, scores and states, on the table's device and in
        its form."""
        n = batch["ids"].numel()
        moved = {name: tensor.to(self.group.device) for name, tensor in batch.items()}
        ids, device = moved["ids"], self.group.device
        _, dtype, width = self._layout
        rows = moved["rows"]
        if "scales" in moved:
            rows = join_int8(rows, moved["scales"])
        elif rows.dtype != dtype:
            rows = stored_as(rows, dtype)
        if not self.keeps_scores:
            scores = torch.empty(0, dtype=torch.int64, device=device)
        elif (scores := moved.get("scores")) is None:
            scores = torch.ones(n, dtype=torch.int64, device=device)
        if (states := moved.get("states")) is None:
            states = torch.zeros((n, width), device=device)
        return [moved.get("slots"), ids, rows, moved["last_steps"], scores, states]
