"""Writes the tables that have files of their own, one folder per shard."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.save_types import FileOptions, SavedFolder
from torchrec_hkv.checkpoint.record import Record, shard_folder
from torchrec_hkv.collective import this_rank
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.progress import expect
from torchrec_hkv.sharding.modules.collection import ShardedTable

#: Change trackers of a rank's shards, by the shards' folders in a checkpoint. None for shards of
#: backends without change trackers.
Trackers = dict[str, Any]


def save_tables(
    folder: Path,
    tables: Mapping[str, ShardedTable],
    options: FileOptions,
    trackers: Trackers | None = None,
) -> dict[str, str]:
    """Writes this rank's shards; in a ``DMPCollection``, those of the first replica.

    All shards are consistent with each other: calls of other threads that change tables wait.

    Args:
        folder: the folder of the checkpoint.
        tables: the tables of the model.
        options: how to write the files.
        trackers: change trackers. Only what changed since their last call is saved. Missing
            trackers are added. None saves whole tables.

    Returns:
        Names of the shards' backends, by the paths of the shards in the checkpoint.

    Raises:
        OSError: writing failed.
    """
    with contextlib.ExitStack() as locks:
        for lookup in _lookups(tables):
            locks.enter_context(lookup.unchanged())
        return _save_tables(folder, tables, options, trackers)


def _lookups(tables: Mapping[str, ShardedTable]) -> list[GroupLookup]:
    """The lookups of tables that have files, without duplicates."""
    rank = this_rank()
    lookups: dict[int, GroupLookup] = {}
    for table in tables.values():
        if not table.has_files or not table.collection.is_first_replica:
            continue
        by_key = table.collection.group_lookups()
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True):
            if holder == rank:
                lookups[id(by_key[shard.key])] = by_key[shard.key]
    return list(lookups.values())


def _save_tables(
    folder: Path,
    tables: Mapping[str, ShardedTable],
    options: FileOptions,
    trackers: Trackers | None,
) -> dict[str, str]:
    rank = this_rank()
    if trackers is None:
        expect(_saved_bytes(tables, rank))
    saved: dict[str, str] = {}
    for key, table in tables.items():
        if not table.has_files or not table.collection.is_first_replica:
            continue
        lookups = table.collection.group_lookups()
        pairs = zip(table.state.shards, table.state.ranks, strict=True)
        for index, (shard, holder) in enumerate(pairs):
            if holder == rank:
                name = shard_folder(key, index)
                path = folder / name
                lookup, tracker = lookups[shard.key], None
                if trackers is not None:
                    if name not in trackers:
                        trackers[name] = lookup.change_tracker(shard.key)
                    tracker = trackers[name]
                if tracker is None:
                    lookup.save_files(shard.key, path, options)
                else:
                    lookup.save_changes(shard.key, path, options, tracker)
                saved[name] = table.planned.backend
    return saved


def _saved_bytes(tables: Mapping[str, ShardedTable], rank: int) -> int:
    """Bytes of all entries on a rank."""
    return sum(
        table.collection.group_lookups()[shard.key].saved_bytes(shard.key)
        for table in tables.values()
        if table.has_files
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True)
        if holder == rank
    )


def start_trackers(
    folder: Path,
    record: Record,
    tables: Mapping[str, ShardedTable],
    options: FileOptions,
    trackers: Trackers,
) -> bool:
    """Makes trackers record changes from now on, after the tables have been loaded.

    Args:
        folder: the folder of the loaded checkpoint.
        record: its record.
        tables: the tables of the model.
        options: options of later saves with these trackers.
        trackers: replaced by the trackers of this rank's shards.

    Returns:
        False if later saves can't be deltas of the checkpoint, because its shards differ from those
        of the model.
    """
    rank = this_rank()
    trackers.clear()
    for key, table in tables.items():
        if not table.has_files:
            continue
        state, saved = table.state, record.tables[key].shards or []
        columns = [(shard.column_offset, shard.column_offset + shard.dim) for shard in state.shards]
        owners = [state.owners(shard) for shard in state.shards]
        if [(s.owners, s.columns) for s in saved] != list(zip(owners, columns, strict=True)):
            return False
        lookups = table.collection.group_lookups()
        for index, (shard, holder) in enumerate(zip(state.shards, state.ranks, strict=True)):
            if holder != rank:
                continue
            name, lookup = shard_folder(key, index), lookups[shard.key]
            tracker = trackers[name] = lookup.change_tracker(shard.key)
            if tracker is None:
                continue
            with lookup.unchanged():
                if not tracker.start_from(folder / name, options.states, options.row_dtype):
                    return False
    return True


def saved_folders(folder: Path, names: Mapping[str, str]) -> dict[str, SavedFolder]:
    """Reads the manifests of the written folders, and syncs their parent folders.

    Args:
        folder: the folder of the checkpoint.
        names: the result of :func:`save_tables`. All files must have been written.
    """
    saved = {}
    for name, backend in names.items():
        path = folder / name
        saved[name] = registry.get(backend).saved_folder(path)
        for parent in (path.parent, path.parent.parent, folder):
            sync_folder(parent)
    return saved
