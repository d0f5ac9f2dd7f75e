"""Tables as sources and targets of files: entries in slot order, in batches of bounded memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest, Reduced, Shard
from torchrec_hkv.hash_table.files.shard_files import (
    Field,
    ShardReader,
    Staging,
    entry_bytes,
    fields_of,
    manifest_fields,
    quantised,
)
from torchrec_hkv.hash_table.files.unique_ids import repeated_id
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.hash_table.stored_rows import int8_parts, join_int8, stored_as
from torchrec_hkv.write_behind import SaveHandle

# Number of batches alive at a time in a load with another capacity: the batch that was read, the
# entries it displaces, and the entries those displace.
_COPIES = 3
# A save uses half of its memory for staging, a quarter to scan for entries, and for each batch read
# from the table two parts of this many.
SAVED_PARTS = 8
# A non-blocking save copies a piece of this share of its memory limit at a time, or of this many
# bytes of a GPU's memory. For each piece the host waits for the GPU twice, and memory of the GPU is
# allocated.
_PIECES, _DEVICE_PIECE = 4, 1 << 30
# Bytes for each slot that the search for the entries of a shard takes, and that counting takes.
_SCAN_BYTES, _COUNT_BYTES = 32, 24

_ops = torch.ops.torchrec_hkv


class FileTable:
    """A table of a group that is saved or loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        self.group = group
        self.table = table
        self.name = group.tables[table].name
        layout = _C.table_layout(group.handle, table)
        *self._layout, self.keeps_scores, self.buckets, self.bucket_slots = layout
        self.fields = fields_of(*self._layout, self.keeps_scores)
        #: Whether rows of files are codes of 8 bits as the table has them.
        self.is_int8 = self._layout[1] == torch.int8
        self.slots = self.buckets * self.bucket_slots
        self._batch_bytes = batch_bytes
        self.batch = self._entries(_COPIES)
        self.scan = max(1, batch_bytes // (4 * _SCAN_BYTES))

    def _entries(self, parts: int) -> int:
        """Number of entries that fit into one of ``parts`` parts of the memory."""
        return max(1, self._batch_bytes // (parts * entry_bytes(self.fields)))


class FileSource(FileTable):
    """A table that is saved.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        batch_bytes: memory limit in bytes.
        only: int64, ascending, on the CPU: slots whose entries are saved; None for all.
        reduced: the reduced form in which entries are saved; None to save them completely.
    """

    def __init__(
        self,
        group: TableGroup,
        table: int,
        batch_bytes: int,
        only: Tensor | None = None,
        reduced: Reduced | None = None,
    ) -> None:
        super().__init__(group, table, batch_bytes)
        self._only = only
        if reduced is not None:
            dim, _, state_dim = self._layout
            dtype = getattr(torch, reduced.dtype)
            state_dim = state_dim if reduced.states else 0
            self.fields = fields_of(dim, dtype, state_dim, self.keeps_scores)

    def _owners(self, most: int) -> Iterator[tuple[int | Tensor, Tensor]]:
        """Yields owner buckets of at most ``most`` slots at a time (-1 for free slots), with the
        first slot, or with all of these slots if only some are saved."""
        total = self.slots if self._only is None else len(self._only)
        for first in range(0, total, most):
            slots, owners = self._owners_of(first, min(most, total - first))
            yield first if slots is None else slots, owners

    def _owners_of(self, first: int, n: int) -> tuple[Tensor | None, Tensor]:
        """Owner buckets of ``n`` slots from ``first`` on; if only some slots are saved, of those,
        with the slots."""
        group, table = self.group, self.table
        if self._only is None:
            return None, _ops.slot_owners(group.counter_tensor, group.handle, table, first, n)
        slots = self._only[first : first + n].to(group.device)
        ids, _ = group.ids_and_steps(table, slots)
        return slots, owner_rank(ids, OWNERS)

    def count_owners(self) -> Tensor:
        """Number of entries of each owner bucket, int64 ``[65536]``."""
        counts = torch.zeros(OWNERS + 1, dtype=torch.int64, device=self.group.device)
        # No batch has memory yet, so that counting may take the whole limit.
        for _, owners in self._owners(max(1, self._batch_bytes // _COUNT_BYTES)):
            counts += torch.bincount(owners.add_(1), minlength=OWNERS + 1)
        return counts[1:].cpu()

    def staging(self, parts: int = 2) -> Staging:
        """Memory for a batch that is being written: one of ``parts`` parts of the memory limit."""
        return Staging(self.fields, self._entries(parts), pin=self.group.device.type == "cuda")

    def pieces(
        self, ranges: Sequence[tuple[int, int]], handle: SaveHandle
    ) -> Iterator[tuple[dict[str, Tensor], list[int], bool]]:
        """Copies all entries in pieces, as the memory of a non-blocking save has room.

        Args:
            ranges: ascending and disjoint ranges of owner buckets that hold all entries.
            handle: handle of the save.

        Yields:
            Entries ordered by range, then by slot; the number of entries of each range; and whether
            the copies are in the GPU's memory instead of the host's.
        """
        device = self.group.device
        entry = entry_bytes(self.fields)
        small = self._entries(_PIECES)
        piece = max(small, _DEVICE_PIECE // entry) if device.type == "cuda" else small
        # The range of each owner bucket; -1, the owner of free slots, comes first.
        number_of = torch.full((OWNERS + 1,), -1, dtype=torch.int32)
        for number, (begin, end) in enumerate(ranges):
            number_of[begin + 1 : end + 1] = number
        number_of = number_of.to(device)
        total, first = self.slots if self._only is None else len(self._only), 0
        while first < total:
            n = min(piece, total - first)
            slots, owners = self._owners_of(first, n)
            numbers = number_of.index_select(0, owners + 1)
            if slots is None:
                slots = (numbers >= 0).nonzero().flatten()
                numbers = numbers.index_select(0, slots)
                slots += first
            size = len(slots) * entry
            on_device = device.type == "cuda" and handle.reserve_on_device(size, device)
            if not on_device:
                if n > small:
                    piece = small
                    continue
                handle.reserve(size)
            if len(ranges) > 1:
                slots = slots.index_select(0, _stable_order(numbers, len(ranges)))
            batch = self._read(slots)
            if device.type == "cuda" and not on_device:
                batch = {name: _pinned_copy(tensor) for name, tensor in batch.items()}
            yield batch, torch.bincount(numbers, minlength=len(ranges)).tolist(), on_device
            first += n

    def batches(self, begin: int, end: int) -> Iterator[dict[str, Tensor]]:
        """Entries of a range of owner buckets in slot order, on the table's device."""
        size = self._entries(SAVED_PARTS)
        for slots in self._slots(begin, end):
            for part in slots.split(size) if slots.numel() else ():
                yield self._read(part)

    def _slots(self, begin: int, end: int) -> Iterator[Tensor]:
        for slots, owners in self._owners(self.scan):
            chosen = ((owners >= begin) & (owners < end)).nonzero().flatten()
            yield slots[chosen] if isinstance(slots, Tensor) else chosen + slots

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        names = ("ids", "rows", "last_steps", "scores", "states")
        read = _ops.read_slots(self.group.handle, self.table, slots)
        batch = {"slots": slots, **dict(zip(names, read, strict=True))}
        (dtype,) = (field.dtype for field in self.fields if field.name == "rows")
        if self.is_int8:
            batch["rows"], batch["scales"] = int8_parts(batch["rows"], self._layout[0])
        elif dtype == torch.int8:
            batch["rows"], batch["scales"] = self._quantised(batch["rows"])
        else:
            batch["rows"] = self._narrowed(batch["rows"], dtype)
        return {field.name: batch[field.name] for field in self.fields}

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantised(rows)
        if not bool(scales.isfinite().all()):
            raise ValueError(
                f"table {self.name!r} has values that are infinite or NaN, which have no codes of "
                "8 bits: save its rows as torch.bfloat16, or as they are."
            )
        return codes, scales

    def _narrowed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == dtype:
            return rows
        narrow = rows.to(dtype)
        if bool((narrow.isinf() & rows.isfinite()).any()):
            raise ValueError(
                f"table {self.name!r} has values beyond {torch.finfo(dtype).max:g}, which {dtype} "
                "can't represent: save its rows as torch.bfloat16, or with their own dtype."
            )
        return narrow


def _stable_order(numbers: Tensor, limit: int) -> Tensor:
    """Returns the stable sorting permutation of numbers below a limit."""
    if numbers.is_cuda or limit >= 1 << 15:
        return numbers.argsort(stable=True)
    # NumPy sorts 16 bits by radix, five times as fast.
    return torch.from_numpy(np.argsort(numbers.short().numpy(), kind="stable"))


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class FileTarget(FileTable):
    """A table that is loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        super().__init__(group, table, batch_bytes)
        self.capacity = group.full_slots(table)

    def staging(self, fields: Sequence[Field]) -> Staging:
        """Host memory for a batch of a file with these fields."""
        return Staging(fields, self.batch, pin=self.group.device.type == "cuda")

    def can_have(self, buckets: int, bucket_slots: int) -> bool:
        """Whether the table has this geometry, or can grow to it."""
        most = self.capacity // self.bucket_slots
        sizes = [self.buckets << k for k in range(64) if self.buckets << k <= most]
        return bucket_slots == self.bucket_slots and buckets in sizes

    def grow(self, manifest: Manifest, exact: bool) -> None:
        """Grows to the saved table's geometry if ``exact``, else until all of its entries fit."""
        if exact:
            self.group.reserve_buckets(self.table, manifest.buckets, manifest.bucket_slots)
        else:
            self.group.reserve(self.table, min(manifest.entries, self.capacity))

    def restore(self, batch: dict[str, Tensor], exact: bool) -> int:
        """Inserts entries; returns how many found no slot.

        Rows are numbers, codes of 8 bits with ``scales``, or as the table stores them. If the table
        stores counts and the entries have none, each gets the count 1.
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

    def restore_together(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """Inserts entries of several files into their own slots, which ascend in each batch;
        returns how many found no slot. For a table on a CPU."""
        self.group.note_restore()
        place = (self.group.counter_tensor, self.group.handle, self.table)
        tensors = zip(*(self._entries_of(batch) for batch in batches), strict=True)
        return _ops.restore_together(*place, *map(list, tensors))

    def _entries_of(self, batch: dict[str, Tensor]) -> list[Any]:
        """Slots, if they are given, ids, rows, last steps, scores and states on the table's device,
        as it has them."""
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


def plan_shards(counts: Tensor, most: int) -> list[tuple[int, int, int]]:
    """Cuts the owner buckets into ranges of at most ``most`` entries.

    Args:
        counts: number of entries of each owner bucket.
        most: maximal number of entries in a shard.

    Returns:
        ``(begin, end, entries)`` of each shard, ascending and disjoint. A bucket with more entries
        is a range by itself, cut into several shards.
    """
    ends = counts.cumsum(0).tolist()  # entries up to the end of each bucket
    plan = []
    begin, before = 0, 0
    while before < ends[-1]:
        end = max(begin + 1, bisect.bisect_right(ends, before + most))
        held = ends[end - 1] - before
        plan += [(begin, end, min(most, held - first)) for first in range(0, held, most)]
        begin, before = end, ends[end - 1]
    return plan


def verify_shard(
    folder: Path,
    manifest: Manifest,
    shard: Shard,
    batch_bytes: int,
    owners: tuple[int, int] = (0, OWNERS),
) -> None:
    """Reads a shard and verifies its checksums, the bucket of each id, and that no id repeats.

    Args:
        folder: the folder of the shard.
        manifest: manifest of the folder.
        shard: a shard of the manifest.
        batch_bytes: host memory limit in bytes.
        owners: range ``[first, end)`` of owner buckets whose ids the table held.

    Raises:
        ValueError: the shard is missing, damaged or does not match the manifest.
    """
    path = folder / shard.file
    fields = manifest_fields(manifest)
    batch = max(1, batch_bytes // (2 * entry_bytes(fields)))
    staging = Staging(fields, min(batch, shard.entries))
    misplaced = 0
    last_slot = -1
    with ShardReader(path, fields, shard) as reader:
        for entries in reader.verified_batches(staging):
            slots = entries["slots"]
            place = (
                entries["ids"],
                slots,
                manifest.buckets,
                manifest.bucket_slots,
                max(shard.owner_begin, owners[0]),
                min(shard.owner_end, owners[1]),
            )
            # Looks at a batch on this thread alone, as other threads verify other files.
            is_sound = int(slots[0]) > last_slot and _ops.are_placed(*place)
            if misplaced or not is_sound:
                misplaced += int(_ops.find_misplaced(*place).sum())
            if misplaced:
                continue
            if not is_sound:
                raise ValueError(
                    f"{path} is inconsistent: its slots do not ascend, so a slot may occur twice."
                )
            last_slot = int(slots[-1])
    if misplaced:
        raise ValueError(
            f"{path} is inconsistent: {misplaced} of its {shard.entries} ids are not in their "
            "own buckets."
        )
    check_unique(folder, manifest, shard, fields, batch_bytes)


def check_unique(
    folder: Path,
    manifest: Manifest,
    shard: Shard,
    fields: Sequence[Field],
    batch_bytes: int,
) -> None:
    """Raises if an id of a shard occurs twice. Only shards of the same owner buckets are compared,
    since ids of other owner buckets differ. There are several only if an owner bucket was too large
    for one."""
    owners = (shard.owner_begin, shard.owner_end)
    together = [s for s in manifest.shards if (s.owner_begin, s.owner_end) == owners]
    if shard != together[0]:
        return  # verified with the first shard
    entries = sum(s.entries for s in together)
    ids_only = [field for field in fields if field.name == "ids"]
    quarter = max(1, batch_bytes // 4)

    def read() -> Iterator[Tensor]:
        staging = Staging(ids_only, min(entries, max(4096, quarter // 32)))
        for one in together:
            with ShardReader(folder / one.file, fields, one) as reader:
                for batch in reader.batches(staging):
                    yield batch["ids"]

    repeated = repeated_id(read, entries, batch_bytes - quarter)
    if repeated is not None:
        raise ValueError(
            f"{folder / shard.file} is inconsistent: it holds id {repeated} more than once."
        )
