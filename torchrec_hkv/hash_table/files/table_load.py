"""Loads a table of a group from files.

``docs/reference/file_format.md`` describes the format.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torchrec_hkv.hash_table.eviction import can_load_policy
from torchrec_hkv.hash_table.files.changes import verify_removed_ids
from torchrec_hkv.hash_table.files.counts_files import SavedCounts, load_counts, verify_counts
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.files.layers import check_layers
from torchrec_hkv.hash_table.files.limits import BATCH_BYTES, check_positive
from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest
from torchrec_hkv.hash_table.files.shard_checks import verify_shard
from torchrec_hkv.hash_table.files.shard_files import (
    ShardReader,
    dequantised,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.hash_table.files.table_identity import describe
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.progress import advance, expect

#: Load factor up to which nothing is evicted.
SAFE_LOAD = 0.95


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of loading a table.

    Attributes:
        epoch: the epoch in which the table was saved.
        lost: number of entries that found no slot.
    """

    epoch: int
    lost: int


def load(
    group: TableGroup,
    table: int,
    path: str | os.PathLike[str],
    *,
    allow_loss: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> Loaded:
    """Replaces the contents of a table, and its group's clock, by saved ones.

    If the table has the geometry of the saved one, or can grow to it, each entry gets its own slot.
    Otherwise entries are inserted again; if both buckets of an entry are full, the lowest score is
    evicted. Tables under LRU, LFU and AgedLFU load files of each other; an id whose count is
    unknown gets the count 1. Calls of other threads wait from the first change to the end.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        path: the folder of the saved table.
        allow_loss: whether to load even if the table is too small; the entries that rank lowest are
            left out.
        batch_bytes: memory limit in bytes, on the host and on the device each.

    Raises:
        ValueError: the files are damaged or of another table, the table is too small, or a backward
            is pending. Nothing has changed then. In two cases the table is empty afterwards: files
            are inconsistent although their checksums are right, or entries find no slot although
            the table is less than 95 % full.
    """
    check_positive(batch_bytes=batch_bytes)
    folder = Path(path)
    manifest = Manifest.read(folder)
    check_layers([(folder, manifest)])
    target = FileTarget(group, table, batch_bytes)
    _check_same_table(folder, manifest, describe(group, table))
    _check_same_optimizer(folder, manifest, group, table)
    _check_fits(folder, manifest, target, allow_loss)
    expect(2 * manifest.entries * entry_bytes(manifest_fields(manifest)))
    verify(folder, manifest, batch_bytes)
    with group.alone():
        # Another thread may have grown the table in the meantime.
        target = FileTarget(group, table, batch_bytes)
        exact = _check_fits(folder, manifest, target, allow_loss)
        lost = _replace(group, table, target, folder, manifest, exact, allow_loss)
        if manifest.counts is not None:
            saved = SavedCounts(folder, manifest.counts, (0, OWNERS))
            load_counts(group, table, [saved], (0, OWNERS), batch_bytes)
        group.fill_frames(table)
        group.optimizer_steps[table] = manifest.optimizer_step
    return Loaded(manifest.epoch, lost)


def _check_fits(folder: Path, manifest: Manifest, target: FileTarget, allow_loss: bool) -> bool:
    """Whether every entry keeps its slot. Raises if the table may be too small."""
    exact = target.can_have(manifest.buckets, manifest.bucket_slots)
    if not exact and not allow_loss:
        _check_capacity(folder, manifest, target)
    return exact


def _replace(
    group: TableGroup,
    table: int,
    target: FileTarget,
    folder: Path,
    manifest: Manifest,
    exact: bool,
    allow_loss: bool,
) -> int:
    """Replaces the table's entries by those of files; returns how many found no slot."""
    clock = group.clock
    group.set_clock(manifest.clock)
    try:
        target.grow(manifest, exact)
    except RuntimeError:  # too little memory
        group.set_clock(clock)
        raise
    group.clear_table(table)
    group.restart_aging(table, manifest.aging)
    try:
        lost = 0
        fields = manifest_fields(manifest)
        staging = target.staging(fields)
        for shard in manifest.shards:
            with ShardReader(folder / shard.file, fields, shard) as reader:
                for batch in reader.batches(staging):
                    if not target.is_int8:
                        batch = dequantised(batch)
                    lost += target.restore(batch, exact)
                    advance(len(batch["ids"]) * entry_bytes(fields))
        if exact and lost:
            raise ValueError(f"{folder} is inconsistent: {lost} of its slots occur twice.")
        if lost and not allow_loss:
            raise ValueError(
                f"{lost} of the {manifest.entries} entries of {folder} found no slot in table "
                f"{target.name!r}: give it a larger capacity, or pass allow_loss=True."
            )
    except BaseException:
        group.clear_table(table)
        raise
    return lost


def verify(folder: Path, manifest: Manifest, batch_bytes: int = BATCH_BYTES) -> None:
    """Reads and verifies all files of a saved table.

    Raises:
        ValueError: a file is missing, damaged or does not match the manifest.
    """
    for shard in manifest.shards:
        verify_shard(folder, manifest, shard, batch_bytes)
        advance(shard.entries * entry_bytes(manifest_fields(manifest)))
    if manifest.counts is not None:
        verify_counts(folder, manifest.counts, batch_bytes)
    if manifest.changes is not None:
        slots = manifest.buckets * manifest.bucket_slots
        verify_removed_ids(folder, manifest.changes, slots, batch_bytes)


def _check_same_table(folder: Path, manifest: Manifest, here: dict[str, Any]) -> None:
    for what in (*here, *manifest.table):
        saved, expected = manifest.table.get(what), here.get(what)
        if what == "eviction" and can_load_policy(expected, saved):
            continue
        if saved != expected:
            raise ValueError(
                f"{folder} is of another table: its {what} is {saved!r}, but that of table "
                f"{here['name']!r} is {expected!r}."
            )


def _check_same_optimizer(folder: Path, manifest: Manifest, group: TableGroup, table: int) -> None:
    # Without an optimizer on either side, states are plain numbers of the user.
    saved, expected = manifest.state_layout, group.state_layout
    if saved and expected and saved != expected:
        raise ValueError(
            f"{folder} has optimizer states of layout {saved}, but table "
            f"{group.tables[table].name!r} is trained by {group.optimizer}, whose states have "
            f"layout {expected}."
        )


def _check_capacity(folder: Path, manifest: Manifest, target: FileTarget) -> None:
    # With one or two buckets, every entry fits in every slot.
    slots = target.capacity
    safe = slots if slots <= 2 * target.bucket_slots else int(SAFE_LOAD * slots)
    if manifest.entries > safe:
        raise ValueError(
            f"{folder} holds {manifest.entries} entries, but table {target.name!r} has "
            f"{slots} slots and is sure to fit only {safe}: give it a larger capacity, or pass "
            "allow_loss=True to leave out those of the lowest scores."
        )
