"""Saves a table of a group to files.

``docs/reference/file_format.md`` describes the format.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.changes import ChangeTracker, TableChanges
from torchrec_hkv.hash_table.files.counts_files import write_counts
from torchrec_hkv.hash_table.files.file_names import counts_name
from torchrec_hkv.hash_table.files.file_source import FileSource
from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.limits import BATCH_BYTES, check_positive
from torchrec_hkv.hash_table.files.manifest import Manifest, new_save_id
from torchrec_hkv.hash_table.files.manifest_parts import Reduced, reduced_of
from torchrec_hkv.hash_table.files.range_writer import (
    StagingPool,
    copy_shards,
    range_writers,
    write_shards,
)
from torchrec_hkv.hash_table.files.save_folder import prepare_folder, remove_others
from torchrec_hkv.hash_table.files.shard_files import entry_bytes
from torchrec_hkv.hash_table.files.shard_plan import plan_shards
from torchrec_hkv.hash_table.files.table_identity import describe
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.progress import expect
from torchrec_hkv.write_behind import SaveHandle, run_or_defer

#: Maximal size of a shard, and minimal size when several threads share a table. A shard of a larger
#: table may be a sixteenth of it, because writing a shard scans all slots.
SHARD_BYTES, MIN_SHARD_BYTES = 1 << 30, 64 << 20
SHARDS = 16


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
            codes with a scale per row. None: no rounding.
        compression: whether shards are compressed by Zstandard.
        handle: handle of a non-blocking save, whose threads write the files. The table's contents
            have been copied when this function returns.

    Raises:
        ValueError: ``path`` exists and is not a saved table, a size is not positive, or
            ``row_dtype`` can't represent a value.
        OSError: writing failed; the previous save is complete.
    """
    given = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    check_positive(batch_bytes=batch_bytes, threads=threads, **given)
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
        manifests: list[Manifest] = []

        def write_manifest() -> None:
            manifests.append(finish())
            manifests[0].write(folder)

        run_or_defer(handle, write_manifest)
    except BaseException:
        if handle is None:
            undo()
        else:
            handle.on_error(undo)
        raise

    def commit() -> None:
        (manifest,) = manifests
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
    found = TableChanges()
    if tracker is not None:
        found = tracker.find_changes(folder, save_name, batch_bytes, written, handle)
    # In a non-blocking save one thread copies, and all ranges are written in parallel.
    share = batch_bytes if handle is not None else max(1, batch_bytes // threads)
    source = FileSource(group, table, share, found.slots, reduced)
    counts = source.count_owners()
    entry = entry_bytes(source.fields)
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(int(counts.sum()) * entry, threads)
    if tracker is not None:
        expect(int(counts.sum()) * entry)  # for a whole table, the caller has reported it
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
    manifest = Manifest(
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
            manifest,
            shards=tuple(shard for writer in writers for shard in writer.shards),
            counts=unadmitted(),
            changes=found.delta_content(),
        )

    return finish


def default_shard_bytes(size: int, threads: int) -> int:
    """Maximal size of the shards of a table whose entries take ``size`` bytes.

    With several threads each gets two shards or more, so that they end at about the same time.
    There are at most about 16 shards, unless there are more threads.
    """
    maximum = SHARD_BYTES
    if threads > 1:
        maximum = min(SHARD_BYTES, max(MIN_SHARD_BYTES, size // (2 * threads)))
    return max(maximum, size // (SHARDS - 1))
