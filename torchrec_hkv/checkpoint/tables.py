"""The tables of a checkpoint that have files of their own: one folder a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.saved import FileOptions, SavedFolder, SavedShard, TablesLoad
from torchrec_hkv.checkpoint.record import (
    RECORD,
    Record,
    TableRecord,
    TableShardRecord,
    shard_folder,
)
from torchrec_hkv.hash_table.files.manifest import sync_folder
from torchrec_hkv.sharding.collection import FoundTable


def _record_of(table: FoundTable, shards: Sequence[TableShardRecord] | None) -> TableRecord:
    """What a checkpoint's record says of a table; the same on every rank."""
    backend = registry.get(table.planned.backend)
    first = table.state.shards[0]
    identity = backend.identity(first, table.planned.optimizer)
    return TableRecord(table.planned.backend, identity, shards)


def save_tables(
    folder: Path, tables: Mapping[str, FoundTable], options: FileOptions
) -> dict[str, SavedFolder]:
    """Writes the shards that this rank holds, all of one moment.

    Calls of other threads that change these tables wait meanwhile.

    Returns:
        What their folders hold, by their paths in the checkpoint.

    Raises:
        OSError: writing failed.
    """
    with contextlib.ExitStack() as held:
        for lookup in _lookups(tables):
            held.enter_context(lookup.unchanged())
        return _save_tables(folder, tables, options)


def _lookups(tables: Mapping[str, FoundTable]) -> list[GroupLookup]:
    """The lookups of tables that have files, each once."""
    rank = _rank()
    lookups: dict[int, GroupLookup] = {}
    for table in tables.values():
        if not table.has_files:
            continue
        by_key = table.collection.group_lookups()
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True):
            if holder == rank:
                lookups[id(by_key[shard.key])] = by_key[shard.key]
    return list(lookups.values())


def _save_tables(
    folder: Path, tables: Mapping[str, FoundTable], options: FileOptions
) -> dict[str, SavedFolder]:
    rank = _rank()
    saved: dict[str, SavedFolder] = {}
    for key, table in tables.items():
        if not table.has_files:
            continue
        lookups = table.collection.group_lookups()
        backend = registry.get(table.planned.backend)
        pairs = zip(table.state.shards, table.state.ranks, strict=True)
        for index, (shard, holder) in enumerate(pairs):
            if holder == rank:
                name = shard_folder(key, index)
                path = folder / name
                lookups[shard.key].save_files(shard.key, path, options)
                saved[name] = backend.saved_folder(path)
                for parent in (path.parent, path.parent.parent, folder):
                    sync_folder(parent)
    return saved


def records_of(
    tables: Mapping[str, FoundTable], saved: Mapping[str, SavedFolder]
) -> dict[str, TableRecord]:
    """What a checkpoint's record says of its tables.

    Args:
        tables: of the model.
        saved: what :func:`save_tables` gave, on all ranks.
    """
    records = {}
    for key, table in tables.items():
        shards = None
        if table.has_files:
            shards = []
            for index, shard in enumerate(table.state.shards):
                name = shard_folder(key, index)
                columns = (shard.column_offset, shard.column_offset + shard.dim)
                held = saved[name]
                shards.append(
                    TableShardRecord(
                        name, table.state.owners(shard), columns, held.entries, held.crc32
                    )
                )
        records[key] = _record_of(table, shards)
    return records


def check_tables(
    folder: Path, records: Mapping[str, TableRecord], tables: Mapping[str, FoundTable]
) -> None:
    """Refuses tables that are not those of a checkpoint.

    Raises:
        ValueError: one sentence naming the table, what is saved and what is needed.
    """
    for key, table in tables.items():
        here = _record_of(table, None)
        saved = records.get(key)
        if saved is None:
            if table.has_files:
                raise ValueError(
                    f"The checkpoint {folder} has no table {key!r} of backend {here.backend!r}: it "
                    f"has {sorted(records)}."
                )
            continue
        if saved.backend != here.backend:
            raise ValueError(
                f"In the checkpoint {folder}, table {key!r} is of backend {saved.backend!r} and "
                f"here of {here.backend!r}: convert it with torchrec_hkv.checkpoint.export_rows "
                "and import_rows."
            )
        backend = registry.get(here.backend)
        for what, own in here.identity.items():
            if not backend.loads(what, saved.identity.get(what), own):
                raise ValueError(
                    f"In the checkpoint {folder}, table {key!r} has {what} "
                    f"{saved.identity.get(what)!r} and here {own!r}."
                )
        if (saved.shards is None) == table.has_files:
            shown = "by id" if saved.shards is not None else "by row number, as dense tables"
            raise ValueError(
                f"In the checkpoint {folder}, table {key!r} has its rows {shown}, and here it is "
                "the other way round: convert it with torchrec_hkv.checkpoint.export_rows and "
                "import_rows."
            )


def files_to_verify(
    folder: Path, record: Record, keys: Iterable[str]
) -> list[tuple[str, SavedShard, str]]:
    """Backend, shard and name of all files of tables.

    Raises:
        ValueError: a folder is damaged, or not the one that the checkpoint was saved with.
    """
    files = []
    for key in keys:
        table = record.tables[key]
        for shard in table.shards or []:
            saved = SavedShard(folder / shard.folder, shard.owners)
            held = registry.get(table.backend).saved_folder(saved.folder)
            _check_bound(saved.folder, held, shard, record)
            files += [(table.backend, saved, name) for name in held.files]
    return files


def _check_bound(folder: Path, held: SavedFolder, shard: TableShardRecord, record: Record) -> None:
    """Refuses the folder of another save, or of another shard of this one."""
    where = f"{folder} is not what the checkpoint was saved with"
    if held.save != record.save:
        raise ValueError(
            f"{where}: it is of save {held.save!r}, but the checkpoint is of save "
            f"{record.save!r}: copy the folder of that save."
        )
    named = {"checksum": shard.crc32, "number of entries": shard.entries, "columns": shard.columns}
    found = {"checksum": held.crc32, "number of entries": held.entries, "columns": held.columns}
    for what, value in named.items():
        if found[what] != value:
            raise ValueError(
                f"{where}: its {what} is {found[what]}, but {RECORD} names {value}: it may be "
                "another shard's folder, copied here."
            )


def open_tables(
    folder: Path,
    records: Mapping[str, TableRecord],
    tables: Mapping[str, FoundTable],
    options: FileOptions,
) -> list[TablesLoad]:
    """The loads of all groups of tables that this rank holds.

    Raises:
        ValueError: a folder is damaged.
    """
    rank = _rank()
    wanted: dict[GroupLookup, dict[str, tuple[list[SavedShard], tuple[int, int]]]] = {}
    for key, table in tables.items():
        if not table.has_files:
            continue
        saved = [SavedShard(folder / s.folder, s.owners) for s in records[key].shards or []]
        lookups = table.collection.group_lookups()
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True):
            if holder == rank:
                of_group = wanted.setdefault(lookups[shard.key], {})
                of_group[shard.key] = (saved, table.state.owners(shard))
    return [lookup.open_files(saved, options) for lookup, saved in wanted.items()]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
