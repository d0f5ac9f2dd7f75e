"""Saves a table of a group to files, and loads it.

``docs/reference/file_format.md`` describes the format.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import name_of, policy_of, reads_files_of
from torchrec_hkv.hash_table.files.changes import ChangeTracker, Look, verify_left
from torchrec_hkv.hash_table.files.counts_files import (
    SavedCounts,
    load_counts,
    verify_counts,
    write_counts,
)
from torchrec_hkv.hash_table.files.file_names import counts_name
from torchrec_hkv.hash_table.files.file_tables import (
    FileTable,
    Source,
    Target,
    plan_shards,
    verify_shard,
)
from torchrec_hkv.hash_table.files.layers import check_layers
from torchrec_hkv.hash_table.files.manifest import (
    OWNERS,
    Manifest,
    Reduced,
    new_save_id,
    reduced_of,
    sync_folder,
)
from torchrec_hkv.hash_table.files.range_writer import (
    StagingPool,
    copy_shards,
    range_writers,
    write_shards,
)
from torchrec_hkv.hash_table.files.save_folder import prepare_folder, remove_others
from torchrec_hkv.hash_table.files.shard_files import (
    ShardReader,
    dequantised,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.hash_table.table_spec import TableSpec
from torchrec_hkv.progress import advance, expect
from torchrec_hkv.write_behind import SaveHandle, run_or_defer

#: Default memory limit of a save or a load, on the host and on a GPU each.
BATCH_BYTES = 64 << 20
#: Maximal size of a shard, and minimal size when several threads share a table. A shard of a larger
#: table may be a sixteenth of it, because writing a shard scans all slots.
SHARD_BYTES, LEAST_SHARD_BYTES = 1 << 30, 64 << 20
SHARDS = 16

#: Load factor up to which nothing is evicted.
SAFE_LOAD = 0.95

# Fields of a spec that may differ between a table and its file.
_FREE_FIELDS = (
    "capacity",
    "initial_capacity",
    "hbm_bytes",
    "admission",
    "expire_after",
    "strict",
    "remember_evicted",
    "restore_counts",
    "deterministic",
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of loading a table.

    Attributes:
        epoch: the epoch in which the table was saved.
        lost: number of entries that found no slot.
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
    shard_bytes: int | None = None,
    threads: int = 1,
    save_id: str | None = None,
    tracker: ChangeTracker | None = None,
    states: bool = True,
    row_dtype: torch.dtype | None = None,
    compression: bool = False,
    handle: SaveHandle | None = None,
) -> None:
    """Saves a table with its scores, last steps, optimizer states and clock.

    If the save is killed, the previous one stays complete. The saved contents are consistent: calls
    of other threads that change a table of the group wait until the files are written.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        path: a folder. An earlier save in it is replaced.
        epoch: epoch of the epoch policies.
        batch_bytes: memory limit in bytes, on the host and on the device each.
        shard_bytes: maximal size of a file. None: 1 GiB, or a sixteenth of a larger table; less for
            a small table and several threads, so that each thread has two files.
        threads: number of threads that write files; they share ``batch_bytes``.
        save_id: id of a save of several tables (:func:`~.manifest.new_save_id`); by default a new
            id.
        tracker: change tracker of the table. Only what changed since its last save is saved, if the
            tracker knows it.
        states: whether optimizer states are saved.
        row_dtype: float16 or bfloat16, to which rows of 32 bits are rounded, or int8 for 8-bit
            codes with a scale for each row. None: no rounding.
        compression: whether shards are compressed by Zstandard.
        handle: handle of a non-blocking save, whose threads write the files. The table's contents
            have been copied when this function returns.

    Raises:
        ValueError: ``path`` exists and is not a saved table, a size is not positive, or
            ``row_dtype`` can't represent a value.
        OSError: writing failed; the previous save is complete.
    """
    given = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    _check_positive(batch_bytes=batch_bytes, threads=threads, **given)
    folder = Path(path)
    prepare_folder(folder)
    written: list[Path] = []

    def undo() -> None:
        if tracker is not None:
            tracker.forget()
        for file in written:
            file.unlink(missing_ok=True)

    try:
        with group.unchanged():
            finish = _write_files(
                group,
                table,
                folder,
                epoch,
                batch_bytes,
                shard_bytes,
                threads,
                save_id,
                written,
                tracker,
                reduced_of(group.tables[table].dtype, states, row_dtype),
                compression,
                handle,
            )
        if handle is not None:
            handle.on_error(undo)
        made: list[Manifest] = []

        def write_manifest() -> None:
            made.append(finish())
            made[0].write(folder)

        run_or_defer(handle, write_manifest)
    except BaseException:
        if handle is None:
            undo()
        else:
            handle.on_error(undo)
        raise

    def commit() -> None:
        (manifest,) = made
        manifest.commit(folder)
        written.clear()  # from here on they are the saved table and must not be deleted
        sync_folder(folder.absolute().parent)
        remove_others(folder, manifest)

    run_or_defer(handle, commit)


def saved_bytes(group: TableGroup, table: int) -> int:
    """Bytes of the entries of a table in files (waits for the device)."""
    return group.sizes()[table] * entry_bytes(FileTable(group, table, 1).fields)


def _write_files(
    group: TableGroup,
    table: int,
    folder: Path,
    epoch: int,
    batch_bytes: int,
    shard_bytes: int | None,
    threads: int,
    save_id: str | None,
    written: list[Path],
    tracker: ChangeTracker | None,
    reduced: Reduced | None,
    compression: bool,
    handle: SaveHandle | None,
) -> Callable[[], Manifest]:
    """Writes all files except the manifest, or copies their contents.

    Files are appended to ``written`` when they are created. Returns a function that returns the
    manifest, after the deferred work.
    """
    save_name = os.urandom(4).hex()
    found = Look()
    if tracker is not None:
        found = tracker.look(folder, save_name, batch_bytes, written, handle)
    # In a non-blocking save one thread copies, and all ranges are written in parallel.
    share = batch_bytes if handle is not None else max(1, batch_bytes // threads)
    source = Source(group, table, share, found.slots, reduced)
    counts = source.count_owners()
    entry = entry_bytes(source.fields)
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(int(counts.sum()) * entry, threads)
    if tracker is not None:
        expect(int(counts.sum()) * entry)  # of a whole table, the caller has reported it
    plan = plan_shards(counts, max(1, shard_bytes // entry))
    parts = 2 if handle is None else max(2, len({ends[:2] for ends in plan}))
    staging = StagingPool(lambda: source.staging(parts))
    writers = range_writers(source, plan, folder, save_name, written, staging, compression)
    if handle is None:
        write_shards(source, writers, threads)
    else:
        copy_shards(source, writers, handle)
    written.append(folder / counts_name(save_name))
    unadmitted = write_counts(group, table, folder, save_name, batch_bytes, handle)
    known = Manifest(
        save=new_save_id() if save_id is None else save_id,
        table=describe(group, table),
        capacity=group.tables[table].capacity,
        initial_capacity=group.tables[table].initial_capacity,
        buckets=source.buckets,
        bucket_slots=source.bucket_slots,
        clock=group.clock,
        epoch=epoch,
        optimizer_step=int(group.optimizer_steps[table]),
        state_layout=group.state_layout,
        entries=int(counts.sum()),
        shards=(),
        reduced=reduced,
        aging=group.measured_aging(table),
    )

    def finish() -> Manifest:
        return dataclasses.replace(
            known,
            shards=tuple(shard for writer in writers for shard in writer.shards),
            counts=unadmitted(),
            changes=found.changes(),
        )

    return finish


def default_shard_bytes(size: int, threads: int) -> int:
    """Maximal size of the shards of a table whose entries take ``size`` bytes.

    With several threads each gets two shards or more, so that they end at about the same time.
    There are at most about 16 shards, unless there are more threads.
    """
    most = SHARD_BYTES
    if threads > 1:
        most = min(SHARD_BYTES, max(LEAST_SHARD_BYTES, size // (2 * threads)))
    return max(most, size // (SHARDS - 1))


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
        allow_loss: whether to load into a table that is too small, too; the entries that rank
            lowest are left out.
        batch_bytes: memory limit in bytes, on the host and on the device each.

    Raises:
        ValueError: the files are damaged or of another table, the table is too small, or a backward
            is pending. Nothing has changed then. Only if files are inconsistent although their
            checksums are right, or entries find no slot although the table is less than 95 % full,
            the table is empty afterwards.
    """
    _check_positive(batch_bytes=batch_bytes)
    folder = Path(path)
    manifest = Manifest.read(folder)
    check_layers([(folder, manifest)])
    target = Target(group, table, batch_bytes)
    _check_same_table(folder, manifest, describe(group, table))
    _check_same_optimizer(folder, manifest, group, table)
    _check_fits(folder, manifest, target, allow_loss)
    expect(2 * manifest.entries * entry_bytes(manifest_fields(manifest)))
    verify(folder, manifest, batch_bytes)
    with group.alone():
        # Another thread may have grown the table in the meantime.
        target = Target(group, table, batch_bytes)
        exact = _check_fits(folder, manifest, target, allow_loss)
        lost = _replace(group, table, target, folder, manifest, exact, allow_loss)
        if manifest.counts is not None:
            saved = SavedCounts(folder, manifest.counts, (0, OWNERS))
            load_counts(group, table, [saved], (0, OWNERS), batch_bytes)
        group.fill_frames(table)
        group.optimizer_steps[table] = manifest.optimizer_step
    return Loaded(manifest.epoch, lost)


def _check_fits(folder: Path, manifest: Manifest, target: Target, allow_loss: bool) -> bool:
    """Whether every entry gets its own slot. Raises if the table may be too small."""
    exact = target.can_have(manifest.buckets, manifest.bucket_slots)
    if not exact and not allow_loss:
        _check_room(folder, manifest, target)
    return exact


def _replace(
    group: TableGroup,
    table: int,
    target: Target,
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
        verify_left(folder, manifest.changes, slots, batch_bytes)


def describe(group: TableGroup, table: int) -> dict[str, Any]:
    """Properties that identify a table, as JSON values: its spec without capacity and memory."""
    spec = group.tables[table]
    names = [field.name for field in dataclasses.fields(spec) if field.name not in _FREE_FIELDS]
    description = {name: _plain(getattr(spec, name)) for name in names}
    description["eviction"] = name_of(spec.eviction)
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
    fields["eviction"] = policy_of(fields["eviction"])
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


def _check_same_table(folder: Path, manifest: Manifest, here: dict[str, Any]) -> None:
    for what in (*here, *manifest.table):
        saved, own = manifest.table.get(what), here.get(what)
        if what == "eviction" and reads_files_of(own, saved):
            continue
        if saved != own:
            raise ValueError(
                f"{folder} is of another table: its {what} is {saved!r}, but that of table "
                f"{here['name']!r} is {own!r}."
            )


def _check_same_optimizer(folder: Path, manifest: Manifest, group: TableGroup, table: int) -> None:
    # Without an optimizer on either side, states are plain numbers of the user.
    saved, own = manifest.state_layout, group.state_layout
    if saved and own and saved != own:
        raise ValueError(
            f"{folder} has optimizer states of layout {saved}, but table "
            f"{group.tables[table].name!r} is trained by {group.optimizer}, whose states have "
            f"layout {own}."
        )


def _check_room(folder: Path, manifest: Manifest, target: Target) -> None:
    # With one or two buckets, every entry fits in every slot.
    slots = target.capacity
    safe = slots if slots <= 2 * target.bucket_slots else int(SAFE_LOAD * slots)
    if manifest.entries > safe:
        raise ValueError(
            f"{folder} holds {manifest.entries} entries, but table {target.name!r} has "
            f"{slots} slots and is sure to fit only {safe}: give it a larger capacity, or pass "
            "allow_loss=True to leave out those of the lowest scores."
        )
