"""The tables of a checkpoint that have files of their own: one folder a shard."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.saved import FileOptions, SavedShard, TablesLoad
from torchrec_hkv.checkpoint.record import TableRecord, TableShardRecord
from torchrec_hkv.hash_table.files.manifest import sync_folder
from torchrec_hkv.sharding.collection import FoundTable

_FOLDER = "tables"
#: Bytes of a folder's name that every file system has.
_MOST_NAME_BYTES = 255


def record_of(key: str, table: FoundTable) -> TableRecord:
    """What a checkpoint's record says of a table; the same on every rank."""
    backend = registry.get(table.planned.backend)
    shards = table.state.shards
    records = [
        TableShardRecord(
            f"{_FOLDER}/{_folder_name(key)}/{index:05d}",
            table.state.owners(shard),
            (shard.column_offset, shard.column_offset + shard.dim),
        )
        for index, shard in enumerate(shards)
    ]
    return TableRecord(
        table.planned.backend,
        backend.identity(shards[0], table.planned.optimizer),
        records if table.has_files else None,
    )


def _folder_name(key: str) -> str:
    """A table's own; of a long key its beginning and a digest, since the record has all of it."""
    name = quote(key, safe="")
    if len(name) <= _MOST_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: _MOST_NAME_BYTES - len(digest) - 1]}-{digest}"


def save_tables(folder: Path, tables: Mapping[str, FoundTable], options: FileOptions) -> None:
    """Writes the shards that this rank holds, all of one moment.

    Calls of other threads that change these tables wait meanwhile.

    Raises:
        OSError: writing failed.
    """
    with contextlib.ExitStack() as held:
        for lookup in _lookups(tables):
            held.enter_context(lookup.unchanged())
        _save_tables(folder, tables, options)


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


def _save_tables(folder: Path, tables: Mapping[str, FoundTable], options: FileOptions) -> None:
    rank = _rank()
    for key, table in tables.items():
        if not table.has_files:
            continue
        lookups = table.collection.group_lookups()
        records = record_of(key, table).shards or []
        for shard, holder, record in zip(
            table.state.shards, table.state.ranks, records, strict=True
        ):
            if holder == rank:
                path = folder / record.folder
                lookups[shard.key].save_files(shard.key, path, options)
                for parent in (path.parent, path.parent.parent, folder):
                    sync_folder(parent)


def check_tables(
    folder: Path, records: Mapping[str, TableRecord], tables: Mapping[str, FoundTable]
) -> None:
    """Refuses tables that are not those of a checkpoint.

    Raises:
        ValueError: one sentence naming the table, what is saved and what is needed.
    """
    for key, table in tables.items():
        here = record_of(key, table)
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
        for what, own in here.identity.items():
            if saved.identity.get(what) != own:
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
    folder: Path, records: Mapping[str, TableRecord], keys: Iterable[str]
) -> list[tuple[str, Path, str]]:
    """Backend, folder and name of all files of tables.

    Raises:
        ValueError: a folder is damaged.
    """
    files = []
    for key in keys:
        record = records[key]
        for shard in record.shards or []:
            path = folder / shard.folder
            names = registry.get(record.backend).saved_files(path)
            files += [(record.backend, path, name) for name in names]
    return files


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
