"""Tables as files see them: entries in the order of slots, in batches of bounded memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.manifest import OWNERS, Manifest, Shard, shard_name
from torchrec_hkv.hash_table.shard_files import (
    ShardReader,
    ShardWriter,
    entry_bytes,
    fields_of,
)
from torchrec_hkv.hash_table.table_group import TableGroup

# Copies of a batch that are alive at once: where a table is loaded into another capacity, what is
# read, what it displaces, and what that displaces.
_COPIES = 3
# Bytes a slot that looking for the entries of a shard takes.
_SCAN_BYTES = 32

_ops = torch.ops.torchrec_hkv


class FileTable:
    """A table of a group as files see it."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        self.group = group
        self.table = table
        self.name = group.tables[table].name
        layout = _C.table_layout(group.handle, table)
        *self._layout, self.keeps_scores, self.buckets, self.bucket_slots = layout
        self.fields = fields_of(*self._layout, self.keeps_scores)
        self.slots = self.buckets * self.bucket_slots
        self.batch = max(1, batch_bytes // (_COPIES * entry_bytes(self.fields)))
        self.scan = max(1, batch_bytes // (2 * _SCAN_BYTES))


class Source(FileTable):
    """A table that is saved."""

    def _owners(self) -> Iterator[tuple[int, Tensor]]:
        """The owner bucket of each slot, -1 where it is free, in pieces with their first slot."""
        for first in range(0, self.slots, self.scan):
            n = min(self.scan, self.slots - first)
            counters = self.group.counter_tensor
            yield first, _ops.slot_owners(counters, self.group.handle, self.table, first, n)

    def count_owners(self) -> Tensor:
        """Entries of each owner bucket, int64 ``[65536]``."""
        counts = torch.zeros(OWNERS + 1, dtype=torch.int64)
        for _, owners in self._owners():
            counts += torch.bincount(owners + 1, minlength=OWNERS + 1).cpu()
        return counts[1:]

    def batches(self, begin: int, end: int) -> Iterator[dict[str, Tensor]]:
        """Entries of a range of owner buckets, in the order of their slots, in host memory."""
        for first, owners in self._owners():
            slots = ((owners >= begin) & (owners < end)).nonzero().flatten() + first
            for part in slots.split(self.batch) if slots.numel() else ():
                yield self._read(part)

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        names = ("ids", "rows", "last_steps", "scores", "states")
        read = _ops.read_slots(self.group.handle, self.table, slots)
        batch = {"slots": slots, **dict(zip(names, read, strict=True))}
        return {field.name: batch[field.name].cpu() for field in self.fields}


class Target(FileTable):
    """A table that is loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        super().__init__(group, table, batch_bytes)
        self.capacity = group.full_slots(table)

    def memory(self) -> dict[str, Tensor]:
        """Host memory for a batch."""
        return {
            field.name: torch.empty(field.shape(self.batch), dtype=field.dtype)
            for field in self.fields
        }

    def can_have(self, buckets: int, bucket_slots: int) -> bool:
        """Whether the table has this geometry, or can grow to it."""
        most = self.capacity // self.bucket_slots
        sizes = [self.buckets << k for k in range(64) if self.buckets << k <= most]
        return bucket_slots == self.bucket_slots and buckets in sizes

    def grow(self, manifest: Manifest, exact: bool) -> None:
        """Grows to the saved table's geometry, or to where all of its entries fit."""
        if exact:
            self.group.reserve_buckets(self.table, manifest.buckets, manifest.bucket_slots)
        else:
            self.group.reserve(self.table, min(manifest.entries, self.capacity))

    def restore(self, batch: dict[str, Tensor], exact: bool) -> int:
        """Puts entries into the table; returns how many found no place."""
        n = batch["ids"].numel()
        moved = {name: tensor.to(self.group.device) for name, tensor in batch.items()}
        ids, device = moved["ids"], self.group.device
        entries = (
            ids,
            moved["rows"],
            moved["last_steps"],
            moved.get("scores", torch.empty(0, dtype=torch.int64, device=device)),
            moved.get("states", torch.empty((n, 0), device=device)),
        )
        place = (self.group.counter_tensor, self.group.handle, self.table)
        if exact:
            placed = _ops.restore_slots(*place, moved["slots"], *entries)
            return 0 if placed.all() else n - int(placed.sum())
        lost = 0
        while entries[0].numel():
            *displaced, counts = _ops.restore_entries(*place, *entries)
            again, refused = counts.tolist()
            lost += refused
            # What another entry took the place of may still have one in its other bucket.
            entries = tuple(tensor[:again] for tensor in displaced)
        return lost


def plan_shards(counts: Tensor, most: int) -> list[tuple[int, int, int]]:
    """Cuts the owner buckets into ranges of at most ``most`` entries.

    Args:
        counts: entries of each owner bucket.
        most: entries a shard may hold.

    Returns:
        ``(begin, end, entries)`` of each shard, ascending and disjoint; but a bucket of more
        entries is a range of its own, cut into several shards.
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


def write_shards(
    source: Source,
    plan: list[tuple[int, int, int]],
    folder: Path,
    save_name: str,
    written: list[Path],
    threads: int = 1,
) -> list[Shard]:
    """Writes the shards of a table.

    Args:
        source: the table.
        plan: of :func:`plan_shards`.
        folder: that exists.
        save_name: 8 hexadecimal digits, a name of this save's own.
        written: gets the files that were begun.
        threads: that write files at the same time, each with batches of its own.

    Raises:
        OSError: writing failed.
        RuntimeError: the table changed meanwhile.
    """
    work: dict[tuple[int, int], list[tuple[Path, int]]] = {}
    for index, (begin, end, entries) in enumerate(plan):
        path = folder / shard_name(save_name, index)
        work.setdefault((begin, end), []).append((path, entries))

    def write(owners: tuple[int, int]) -> list[Shard]:
        return list(_write_range(source, owners, work[owners], written))

    if threads == 1:
        ranges = [write(owners) for owners in work]
    else:
        with ThreadPoolExecutor(threads) as pool:
            ranges = list(pool.map(write, work))
    return [shard for shards in ranges for shard in shards]


def _write_range(
    source: Source,
    owners: tuple[int, int],
    files: list[tuple[Path, int]],
    written: list[Path],
) -> Iterator[Shard]:
    batches = source.batches(*owners)
    rest: dict[str, Tensor] = {}
    for path, entries in files:
        written.append(path)
        with ShardWriter(path, source.fields, owners, entries) as writer:
            while room := writer.room:
                batch = rest or next(batches, None)
                if batch is None:
                    raise RuntimeError(f"table {source.name!r} changed while it was saved.")
                writer.append({name: tensor[:room] for name, tensor in batch.items()})
                more = batch["ids"].numel() > room
                rest = {name: tensor[room:] for name, tensor in batch.items()} if more else {}
            yield writer.finish()


def verify_shard(folder: Path, manifest: Manifest, shard: Shard, batch_bytes: int) -> None:
    """Reads a shard: all of its bytes, and that every id stands where it may.

    Raises:
        ValueError: it is missing, damaged, or contradicts the manifest.
    """
    path = folder / shard.file
    table = manifest.table
    fields = fields_of(
        table["dim"],
        getattr(torch, table["dtype"]),
        table["state_dim"],
        table["eviction"] != "lru",
    )
    batch = max(1, batch_bytes // entry_bytes(fields))
    memory = {
        field.name: torch.empty(field.shape(min(batch, shard.entries)), dtype=field.dtype)
        for field in fields
    }
    misplaced = 0
    with ShardReader(path, fields, shard) as reader:
        for entries in reader.verified_batches(memory):
            wrong = _ops.find_misplaced(
                entries["ids"],
                entries["slots"],
                manifest.buckets,
                manifest.bucket_slots,
                shard.owner_begin,
                shard.owner_end,
            )
            misplaced += int(wrong.sum()) if wrong.any() else 0
    if misplaced:
        raise ValueError(
            f"{path} contradicts itself: {misplaced} of its {shard.entries} ids are not in their "
            "own buckets."
        )
