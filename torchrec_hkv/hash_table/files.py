"""Saving a table of a group to files, and loading it. ``docs/file_format.md`` has the format."""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.hash_table.manifest import (
    OWNERS,
    Manifest,
    Shard,
    prepare_folder,
    remove_others,
    shard_name,
    sync_folder,
)
from torchrec_hkv.hash_table.shard_files import (
    ShardReader,
    ShardWriter,
    entry_bytes,
    fields_of,
)
from torchrec_hkv.hash_table.table_group import TableGroup
from torchrec_hkv.hash_table.table_spec import TableSpec

#: What a save or a load may take of host memory, and as much of a GPU's.
BATCH_BYTES = 64 << 20
#: Size that shards keep below.
SHARD_BYTES = 1 << 30

# Copies of a batch that are alive at once: where a table is loaded into another capacity, what is
# read, what it displaces, and what that displaces.
_COPIES = 3
# Bytes a slot that looking for the entries of a shard takes.
_SCAN_BYTES = 32
# Nothing is evicted before a table is this full (promise 7).
_SAFE_LOAD = 0.95

# A spec's fields that may differ between a table and its file.
_FREE_FIELDS = (
    "capacity",
    "initial_capacity",
    "hbm_bytes",
    "admission",
    "expire_after",
    "strict",
    "remember_evicted",
)

_ops = torch.ops.torchrec_hkv


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What loading a table tells.

    Attributes:
        epoch: that the table was saved in.
        lost: entries that found no place.
    """

    epoch: int
    lost: int


def save(
    group: TableGroup,
    table: int,
    path: str | os.PathLike[str],
    *,
    epoch: int = 0,
    batch_bytes: int = BATCH_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Saves a table with its scores, last steps, optimizer state and clock.

    A save that is killed leaves the last one whole. The table must not be changed meanwhile.

    Args:
        group: the table's.
        table: its index there.
        path: a folder; an earlier save in it is replaced.
        epoch: of the epoch policies.
        batch_bytes: memory the save may take, on the host and on the device.
        shard_bytes: size that files keep below.

    Raises:
        ValueError: ``path`` is something else than a saved table, or a size is not positive.
        OSError: writing failed; the last save is whole.
    """
    _check_positive(batch_bytes=batch_bytes, shard_bytes=shard_bytes)
    source = _Source(group, table, batch_bytes)
    folder = Path(path)
    prepare_folder(folder)
    plan = plan_shards(source.count_owners(), max(1, shard_bytes // entry_bytes(source.fields)))
    written: list[Path] = []
    try:
        shards = tuple(_write_shards(source, plan, folder, written))
        manifest = Manifest(
            table=describe(group, table),
            capacity=group.tables[table].capacity,
            initial_capacity=group.tables[table].initial_capacity,
            buckets=source.buckets,
            bucket_slots=source.bucket_slots,
            clock=group.clock,
            epoch=epoch,
            optimizer_step=int(group.optimizer_steps[table]),
            state_layout=group.state_layout,
            entries=sum(shard.entries for shard in shards),
            shards=shards,
        )
        manifest.write(folder)
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
        raise
    manifest.commit(folder)
    sync_folder(folder.absolute().parent)
    remove_others(folder, manifest)


def load(
    group: TableGroup,
    table: int,
    path: str | os.PathLike[str],
    *,
    allow_loss: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> Loaded:
    """Replaces all that a table holds, and its group's clock, by what was saved.

    Where the table has the geometry of the saved one, or can grow to it, every entry gets its own
    slot again. In another one entries are placed anew; where both buckets of an entry are full, the
    lowest scores leave.

    Args:
        group: the table's.
        table: its index there.
        path: as it was saved to.
        allow_loss: load also into a table that is too small; what ranks lowest is left out.
        batch_bytes: memory the load may take, on the host and on the device.

    Raises:
        ValueError: the files are damaged or of another table, the table is too small, or a backward
            is still to come. Nothing has changed then. Only where files contradict themselves in
            spite of right checksums, or entries find no place although the table is less than 95 %
            full, is it left empty.
    """
    _check_positive(batch_bytes=batch_bytes)
    folder = Path(path)
    manifest = Manifest.read(folder)
    target = _Target(group, table, batch_bytes)
    _check_same_table(folder, manifest, describe(group, table))
    _check_same_optimizer(folder, manifest, group, table)
    exact = target.can_have(manifest.buckets, manifest.bucket_slots)
    if not exact and not allow_loss:
        _check_room(folder, manifest, target)
    for shard in manifest.shards:
        _verify(folder, manifest, shard, target)
    clock = group.clock
    group.set_clock(manifest.clock)
    try:
        target.grow(manifest, exact)
    except RuntimeError:  # too little memory
        group.set_clock(clock)
        raise
    group.clear_table(table)
    try:
        lost = 0
        for shard in manifest.shards:
            with ShardReader(folder / shard.file, target.fields, shard) as reader:
                for batch in reader.batches(target.memory):
                    lost += target.restore(batch, exact)
        if exact and lost:
            raise ValueError(f"{folder} contradicts itself: {lost} of its slots are taken twice.")
        if lost and not allow_loss:
            raise ValueError(
                f"{lost} of the {manifest.entries} entries of {folder} found no place in table "
                f"{target.name!r}: give it a larger capacity, or pass allow_loss=True."
            )
    except BaseException:
        group.clear_table(table)
        raise
    group.fill_frames(table)
    group.optimizer_steps[table] = manifest.optimizer_step
    return Loaded(manifest.epoch, lost)


def describe(group: TableGroup, table: int) -> dict[str, Any]:
    """What makes a table this table, in JSON's types: its spec but for capacity and memory."""
    spec = group.tables[table]
    names = [field.name for field in dataclasses.fields(spec) if field.name not in _FREE_FIELDS]
    description = {name: _plain(getattr(spec, name)) for name in names}
    return {**description, "state_dim": _C.table_layout(group.handle, table)[2]}


def saved_spec(path: str | os.PathLike[str]) -> tuple[TableSpec, int]:
    """The spec of a saved table, and the width of its states.

    Raises:
        ValueError: there is no saved table, or it is damaged.
    """
    manifest = Manifest.read(Path(path))
    fields = dict(manifest.table)
    state_dim = fields.pop("state_dim")
    fields["dtype"] = getattr(torch, fields["dtype"])
    if fields["initializer"] is not None:
        fields["initializer"] = initializer_from_fields(fields["initializer"])
    sizes = {"capacity": manifest.capacity, "initial_capacity": manifest.initial_capacity}
    return TableSpec(**fields, **sizes), state_dim


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value):
        return {"type": type(value).__name__, **dataclasses.asdict(value)}
    return value


def _check_positive(**sizes: int) -> None:
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what} is {size}, but must be at least 1.")


class _Table:
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


class _Source(_Table):
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


class _Target(_Table):
    """A table that is loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        super().__init__(group, table, batch_bytes)
        self.memory = {
            field.name: torch.empty(field.shape(self.batch), dtype=field.dtype)
            for field in self.fields
        }
        self.capacity = group.full_slots(table)

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


def _write_shards(
    source: _Source, plan: list[tuple[int, int, int]], folder: Path, written: list[Path]
) -> Iterator[Shard]:
    save_name = os.urandom(4).hex()
    index = 0
    for begin, end in dict.fromkeys((begin, end) for begin, end, _ in plan):
        sizes = [entries for first, _, entries in plan if first == begin]
        batches = source.batches(begin, end)
        rest: dict[str, Tensor] = {}
        for entries in sizes:
            path = folder / shard_name(save_name, index)
            index += 1
            written.append(path)
            with ShardWriter(path, source.fields, (begin, end), entries) as writer:
                while room := writer.room:
                    batch = rest or next(batches, None)
                    if batch is None:
                        raise RuntimeError(f"table {source.name!r} changed while it was saved.")
                    writer.append({name: tensor[:room] for name, tensor in batch.items()})
                    more = batch["ids"].numel() > room
                    rest = {name: tensor[room:] for name, tensor in batch.items()} if more else {}
                yield writer.finish()


def _check_same_table(folder: Path, manifest: Manifest, here: dict[str, Any]) -> None:
    for what in (*here, *manifest.table):
        saved, own = manifest.table.get(what), here.get(what)
        if saved != own:
            raise ValueError(
                f"{folder} is of another table: its {what} is {saved!r}, but that of table "
                f"{here['name']!r} is {own!r}."
            )


def _check_same_optimizer(folder: Path, manifest: Manifest, group: TableGroup, table: int) -> None:
    # Where either has no optimizer, states are numbers that mean nothing here.
    saved, own = manifest.state_layout, group.state_layout
    if saved and own and saved != own:
        raise ValueError(
            f"{folder} has optimizer states of layout {saved}, but table "
            f"{group.tables[table].name!r} is trained by {group.optimizer}, whose states have "
            f"layout {own}."
        )


def _check_room(folder: Path, manifest: Manifest, target: _Target) -> None:
    # With one bucket or two, every entry may take every slot.
    slots = target.capacity
    safe = slots if slots <= 2 * target.bucket_slots else int(_SAFE_LOAD * slots)
    if manifest.entries > safe:
        raise ValueError(
            f"{folder} holds {manifest.entries} entries, but table {target.name!r} has "
            f"{slots} slots and surely takes {safe}: give it a larger capacity, or pass "
            "allow_loss=True to leave out those of the lowest scores."
        )


def _verify(folder: Path, manifest: Manifest, shard: Shard, target: _Target) -> None:
    path = folder / shard.file
    misplaced = 0
    with ShardReader(path, target.fields, shard) as reader:
        for batch in reader.verified_batches(target.memory):
            wrong = _ops.find_misplaced(
                batch["ids"],
                batch["slots"],
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
