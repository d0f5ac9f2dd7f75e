"""Saves a table of a group to files, and loads it.

``docs/reference/file_format.md`` has the format.
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
from torchrec_hkv.hash_table.files.file_tables import (
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
    counts_name,
    new_save_id,
    prepare_folder,
    reduced_of,
    remove_others,
    sync_folder,
)
from torchrec_hkv.hash_table.files.range_writer import (
    StagingPool,
    copy_shards,
    range_writers,
    write_shards,
)
from torchrec_hkv.hash_table.files.shard_files import (
    ShardReader,
    dequantised,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.hash_table.table_spec import TableSpec
from torchrec_hkv.write_behind import SaveHandle, run_or_defer

#: What a save or a load may take of host memory, and as much of a GPU's.
BATCH_BYTES = 64 << 20
#: Size that shards of a table keep below, but a sixteenth of a larger table's: each shard costs a
#: look at all slots. Several threads share a table in shards that are no less than the second.
SHARD_BYTES, LEAST_SHARD_BYTES = 1 << 30, 64 << 20
SHARDS = 16

#: Nothing is evicted before a table is this full (promise 7).
SAFE_LOAD = 0.95

# A spec's fields that may differ between a table and its file.
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
    shard_bytes: int | None = None,
    threads: int = 1,
    save_id: str | None = None,
    tracker: ChangeTracker | None = None,
    states: bool = True,
    row_dtype: torch.dtype | None = None,
    compression: bool = False,
    handle: SaveHandle | None = None,
) -> None:
    """Saves a table with its scores, last steps, optimizer state and clock.

    A save that is killed leaves the last one whole. What is saved is of one moment: calls of other
    threads that change a table of the group wait until the files are written.

    Args:
        group: the table's.
        table: its index there.
        path: a folder; an earlier save in it is replaced.
        epoch: of the epoch policies.
        batch_bytes: memory the save may take, on the host and on the device.
        shard_bytes: size that files keep below. None: 1 GiB, or a sixteenth of a larger table; of
            a smaller one less, so that several threads have two files each.
        threads: that write files at the same time; they share ``batch_bytes``.
        save_id: of a save of several tables (:func:`~.manifest.new_save_id`); by default one of
            its own.
        tracker: of the table: what changed since its last save is saved alone, where it can say.
        states: whether optimizer states are saved.
        row_dtype: float16 or bfloat16, which rows of 32 bits are rounded to, or int8 for codes of 8
            bits with a scale a row; None to save all bits.
        compression: whether shards are compressed by Zstandard.
        handle: of a save that does not block: its threads write what is copied here. All that the
            table holds has been copied when this function returns.

    Raises:
        ValueError: ``path`` is something else than a saved table, a size is not positive, or a
            value of a row is none of ``row_dtype``.
        OSError: writing failed; the last save is whole.
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
        written.clear()  # they are the saved table now, whatever fails after this
        sync_folder(folder.absolute().parent)
        remove_others(folder, manifest)

    run_or_defer(handle, commit)


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
    """Writes all files but the manifest, or copies what they are to hold.

    ``written`` gets the files that were begun. What is returned gives the manifest, once all that
    was deferred is done.
    """
    save_name = os.urandom(4).hex()
    found = Look()
    if tracker is not None:
        found = tracker.look(folder, save_name, batch_bytes, written, handle)
    # Without blocking, one thread copies, and all ranges are written beside each other.
    share = batch_bytes if handle is not None else max(1, batch_bytes // threads)
    source = Source(group, table, share, found.slots, reduced)
    counts = source.count_owners()
    entry = entry_bytes(source.fields)
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(int(counts.sum()) * entry, threads)
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
    """What shards of a table keep below whose entries have so many bytes.

    So many that the threads end at about the same time, but 16 or so at most where each thread
    still has one.
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
    """Replaces all that a table holds, and its group's clock, by what was saved.

    Where the table has the geometry of the saved one, or can grow to it, every entry gets its own
    slot again. In another one entries are placed anew; where both buckets of an entry are full, the
    lowest scores leave. Tables under LRU, LFU and AgedLFU load what the others have saved; an id
    whose count is not known counts once. Calls of other threads wait from the first change until
    all is loaded.

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
    check_layers([(folder, manifest)])
    target = Target(group, table, batch_bytes)
    _check_same_table(folder, manifest, describe(group, table))
    _check_same_optimizer(folder, manifest, group, table)
    _check_fits(folder, manifest, target, allow_loss)
    verify(folder, manifest, batch_bytes)
    with group.alone():
        # Another thread may have made the table grow since.
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
    """Whether every entry gets its own slot; refuses a table that may be too small."""
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
    """Puts the entries of files in the place of the table's; returns how many found no place."""
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
                    lost += target.restore(dequantised(batch), exact)
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
    return lost


def verify(folder: Path, manifest: Manifest, batch_bytes: int = BATCH_BYTES) -> None:
    """Reads all files of a saved table.

    Raises:
        ValueError: one is missing, damaged, or contradicts the manifest.
    """
    for shard in manifest.shards:
        verify_shard(folder, manifest, shard, batch_bytes)
    if manifest.counts is not None:
        verify_counts(folder, manifest.counts, batch_bytes)
    if manifest.changes is not None:
        slots = manifest.buckets * manifest.bucket_slots
        verify_left(folder, manifest.changes, slots, batch_bytes)


def describe(group: TableGroup, table: int) -> dict[str, Any]:
    """What makes a table this table, in JSON's types: its spec but for capacity and memory."""
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
    # Where either has no optimizer, states are numbers that mean nothing here.
    saved, own = manifest.state_layout, group.state_layout
    if saved and own and saved != own:
        raise ValueError(
            f"{folder} has optimizer states of layout {saved}, but table "
            f"{group.tables[table].name!r} is trained by {group.optimizer}, whose states have "
            f"layout {own}."
        )


def _check_room(folder: Path, manifest: Manifest, target: Target) -> None:
    # With one bucket or two, every entry may take every slot.
    slots = target.capacity
    safe = slots if slots <= 2 * target.bucket_slots else int(SAFE_LOAD * slots)
    if manifest.entries > safe:
        raise ValueError(
            f"{folder} holds {manifest.entries} entries, but table {target.name!r} has "
            f"{slots} slots and surely takes {safe}: give it a larger capacity, or pass "
            "allow_loss=True to leave out those of the lowest scores."
        )
