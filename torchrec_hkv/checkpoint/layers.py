"""The folders of a checkpoint: a single one, or a delta and the folders that it builds on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.save_types import SavedFolder, SavedShard
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Chain
from torchrec_hkv.checkpoint.dcp_folders import refuse_dcp_folder
from torchrec_hkv.checkpoint.record import RECORD, Record, TableShardRecord

#: Folders of checkpoints and their records, the newest first. A delta is followed by its
#: predecessor; the last one is a base or a single checkpoint.
Layers = Sequence[tuple[Path, Record]]


def read_saved(path: Path) -> Layers:
    """Folders and records of the checkpoint at a path, which may be in a chain or be a chain.

    Raises:
        ValueError: there is no checkpoint, or a checkpoint of the chain is missing or of another
            chain.
    """
    chain = Chain.at(path)
    if chain is not None:
        return chain.layers()
    if not (path / RECORD).is_file():
        refuse_dcp_folder(path)
    folder = AtomicFolder(path).newest()
    return [(folder, Record.read(folder))]


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
            for saved, folder in _shard_layers(layers, key, index):
                skipped = folder.entry_files if but_entries else ()
                files += [
                    (table.backend, saved, name) for name in folder.files if name not in skipped
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
        saved_folder = registry.get(table.backend).saved_folder(saved.folder)
        _check_bound(saved.folder, saved_folder, shard, record)
        yield saved, saved_folder
        if saved_folder.is_whole:
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


def _check_bound(
    folder: Path, saved_folder: SavedFolder, shard: TableShardRecord, record: Record
) -> None:
    """Checks that a folder was saved with this checkpoint, as this shard."""
    where = f"{folder} is not what the checkpoint was saved with"
    if saved_folder.save != record.save:
        raise ValueError(
            f"{where}: it is of save {saved_folder.save!r}, but the checkpoint is of save "
            f"{record.save!r}: copy the folder of that save."
        )
    named = {"checksum": shard.crc32, "number of entries": shard.entries, "columns": shard.columns}
    found = {
        "checksum": saved_folder.crc32,
        "number of entries": saved_folder.entries,
        "columns": saved_folder.columns,
    }
    for what, value in named.items():
        if found[what] != value:
            raise ValueError(
                f"{where}: its {what} is {found[what]}, but {RECORD} names {value}: it may be "
                "another shard's folder, copied here."
            )
