"""Tables of a checkpoint that have files of their own, one folder for each shard."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.saved import FileOptions, Placed, SavedFolder, SavedShard, TablesLoad
from torchrec_hkv.checkpoint.record import (
    RECORD,
    Record,
    TableRecord,
    TableShardRecord,
    shard_folder,
)
from torchrec_hkv.hash_table.files.manifest import sync_folder
from torchrec_hkv.progress import expect
from torchrec_hkv.sharding.modules.collection import FoundTable
from torchrec_hkv.warn import warn


def _record_of(table: FoundTable, shards: Sequence[TableShardRecord] | None) -> TableRecord:
    """The entry of a table in a checkpoint's record; the same on every rank."""
    backend = registry.get(table.planned.backend)
    first = table.state.shards[0]
    identity = backend.identity(first, table.planned.optimizer)
    return TableRecord(table.planned.backend, identity, shards)


#: Change trackers of a rank's shards, by the shards' folders in a checkpoint. None for shards of
#: backends without change trackers.
Trackers = dict[str, Any]


def save_tables(
    folder: Path,
    tables: Mapping[str, FoundTable],
    options: FileOptions,
    trackers: Trackers | None = None,
) -> dict[str, str]:
    """Writes this rank's shards; in a ``DMPCollection``, those of the first replica.

    All shards are of the same moment: calls of other threads that change the tables wait.

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
    with contextlib.ExitStack() as held:
        for lookup in _lookups(tables):
            held.enter_context(lookup.unchanged())
        return _save_tables(folder, tables, options, trackers)


def _lookups(tables: Mapping[str, FoundTable]) -> list[GroupLookup]:
    """The lookups of tables that have files, without duplicates."""
    rank = _rank()
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
    tables: Mapping[str, FoundTable],
    options: FileOptions,
    trackers: Trackers | None,
) -> dict[str, str]:
    rank = _rank()
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


def _saved_bytes(tables: Mapping[str, FoundTable], rank: int) -> int:
    """Bytes of all entries on a rank."""
    return sum(
        table.collection.group_lookups()[shard.key].saved_bytes(shard.key)
        for table in tables.values()
        if table.has_files
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True)
        if holder == rank
    )


def see_tables(
    folder: Path,
    record: Record,
    tables: Mapping[str, FoundTable],
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
    rank = _rank()
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
                if not tracker.see(folder / name, options.states, options.row_dtype):
                    return False
    return True


def saved_folders(folder: Path, names: Mapping[str, str]) -> dict[str, SavedFolder]:
    """Reads what the written folders hold, and syncs their parent folders.

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


def records_of(
    tables: Mapping[str, FoundTable], saved: Mapping[str, SavedFolder]
) -> dict[str, TableRecord]:
    """The entries of tables in a checkpoint's record.

    Args:
        tables: the tables of the model.
        saved: the results of :func:`saved_folders` of all ranks.
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
    """Checks that the tables of a model match those of a checkpoint.

    Raises:
        ValueError: they don't; the message names the table, what is saved and what is needed.
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
            kinds = ["by row number, as in a dense table", "by id"]
            there, here_ = kinds if saved.shards is None else reversed(kinds)
            raise ValueError(
                f"In the checkpoint {folder}, table {key!r} has its rows {there}, and here "
                f"{here_}: convert it with torchrec_hkv.checkpoint.export_rows and import_rows."
            )


#: Folders of checkpoints and their records, the newest first. A delta is followed by its
#: predecessor; the last one is a base or a single checkpoint.
Layers = Sequence[tuple[Path, Record]]


def files_to_verify(
    layers: Layers, keys: Iterable[str], *, but_entries: bool = False
) -> list[tuple[str, SavedShard, str]]:
    """Backend, shard and name of each file of the tables.

    Args:
        layers: the checkpoint.
        keys: full names of the tables.
        but_entries: whether files that a load verifies itself are left out.

    Raises:
        ValueError: a folder is damaged, or is not the one that was saved with the checkpoint.
    """
    files = []
    for key in keys:
        table = layers[0][1].tables[key]
        for index in range(len(table.shards or [])):
            for saved, held in _shard_layers(layers, key, index):
                skipped = held.entry_files if but_entries else ()
                files += [
                    (table.backend, saved, name) for name in held.files if name not in skipped
                ]
    return files


def _shard_layers(layers: Layers, key: str, index: int) -> Iterator[tuple[SavedShard, SavedFolder]]:
    """Folders of a shard and their contents, from the newest back to one that holds the whole
    shard."""
    newest = layers[0][1].tables[key]
    for folder, record in layers:
        table = record.tables.get(key)
        if (
            table is None
            or (table.backend, table.identity) != (newest.backend, newest.identity)
            or [(s.owners, s.columns) for s in table.shards or []]
            != [(s.owners, s.columns) for s in newest.shards or []]
        ):
            raise ValueError(
                f"{folder} is of another model than {layers[0][0]}: its table {key!r} has other "
                "properties or other shards."
            )
        shard = table.shards[index]
        saved = SavedShard(folder / shard.folder, shard.owners)
        held = registry.get(table.backend).saved_folder(saved.folder)
        _check_bound(saved.folder, held, shard, record)
        yield saved, held
        if held.is_whole:
            return
    raise ValueError(
        f"{saved.folder} holds only what changed in table {key!r} since an earlier checkpoint, "
        "which is not there: load the folder that the chain of deltas is in."
    )


def saved_shards(layers: Layers, key: str) -> list[SavedShard]:
    """All shards of a table, each with its folders in the layers."""
    shards = []
    for index in range(len(layers[0][1].tables[key].shards or [])):
        first, *earlier = [saved for saved, _ in _shard_layers(layers, key, index)]
        folders = tuple(saved.folder for saved in earlier)
        shards.append(dataclasses.replace(first, earlier=folders))
    return shards


def _check_bound(folder: Path, held: SavedFolder, shard: TableShardRecord, record: Record) -> None:
    """Checks that a folder was saved with this checkpoint, as this shard."""
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


def are_untouched(tables: Mapping[str, FoundTable]) -> bool:
    """Whether this rank's shards of all tables with files are empty and have not been used."""
    rank = _rank()
    return all(
        table.collection.group_lookups()[shard.key].is_untouched()
        for table in tables.values()
        if table.has_files
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True)
        if holder == rank
    )


def open_tables(
    layers: Layers,
    tables: Mapping[str, FoundTable],
    options: FileOptions,
) -> list[GroupLoad]:
    """Opens the saved tables for each group of tables on this rank.

    Raises:
        ValueError: a folder is damaged.
    """
    rank = _rank()
    wanted: dict[GroupLookup, dict[str, tuple[list[SavedShard], tuple[int, int]]]] = {}
    names: dict[GroupLookup, dict[str, str]] = {}
    for key, table in tables.items():
        if not table.has_files:
            continue
        saved = saved_shards(layers, key)
        lookups = table.collection.group_lookups()
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True):
            if holder == rank:
                of_group = wanted.setdefault(lookups[shard.key], {})
                of_group[shard.key] = (saved, table.state.owners(shard))
                names.setdefault(lookups[shard.key], {})[shard.key] = key
    return [
        GroupLoad(lookup.open_files(saved, options), names[lookup])
        for lookup, saved in wanted.items()
    ]


@dataclasses.dataclass(frozen=True)
class GroupLoad:
    """A load of the tables of one group.

    Attributes:
        load: the backend's load.
        tables: full names of tables, by the keys of their shards.
    """

    load: TablesLoad
    tables: Mapping[str, str]

    def run(self) -> list[tuple[str, Placed]]:
        """Loads the tables. Returns, for each shard, the full name of its table and the number of
        entries that were loaded and lost."""
        return [(self.tables[key], placed) for key, placed in self.load.run().items()]


def warn_of_losses(placed: Mapping[str, Placed]) -> None:
    """Warns once about all entries that found no slot.

    Args:
        placed: numbers of entries over all ranks, by the full names of tables.
    """
    parts = [
        f"{held.lost} of {held.entries} ({100 * held.lost / held.entries:.2f} %) of table {name!r}"
        for name, held in placed.items()
        if held.lost
    ]
    if parts:
        warn(
            "Entries of the checkpoint found no place and were left out, those of the lowest "
            f"scores: {', '.join(parts)}. Larger num_embeddings take all; "
            "allow_loss=False refuses such a load."
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
