"""Saves and loads shards of hash tables as files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrec_hkv.backends.save_types import (
    FileOptions,
    LoadCounts,
    SavedFolder,
    SavedShard,
    TablesLoad,
)
from torchrec_hkv.hash_table import TableGroup, files
from torchrec_hkv.hash_table.files.changes import ChangeTracker, verify_removed_ids
from torchrec_hkv.hash_table.files.counts_files import verify_counts
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.merge import merge_layers
from torchrec_hkv.hash_table.files.parts_load import PartsLoad
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_checks import verify_shard
from torchrec_hkv.warn import warn


def save_table(
    group: TableGroup,
    table: int,
    folder: Path,
    options: FileOptions,
    tracker: ChangeTracker | None = None,
) -> None:
    """Implements :meth:`GroupLookup.save_files`, and :meth:`GroupLookup.save_changes`."""
    files.save(
        group,
        table,
        folder,
        batch_bytes=options.batch_bytes,
        threads=options.threads,
        save_id=options.save,
        tracker=tracker,
        epoch=group.epoch,
        states=options.states,
        row_dtype=options.row_dtype,
        compression=options.compression is not None,
        handle=options.handle,
    )


def _part(shard: SavedShard) -> SavedPart:
    earlier = tuple((folder, Manifest.read(folder)) for folder in shard.earlier)
    return SavedPart(shard.folder, shard.owners, Manifest.read(shard.folder), earlier)


class HashTablesLoad(TablesLoad):
    """Loads tables of one group from files.

    Args:
        group: the group of the tables.
        saved: by table index: the key of its shard, its number of rows over all ranks, the index
            of one of its features, all shards of the saved table, and the range of owner buckets
            whose ids the table holds.
        options: how to read the files.
    """

    def __init__(
        self,
        group: TableGroup,
        saved: Mapping[int, tuple[str, int, int, Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> None:
        self._group = group
        self._keys = [key for key, *_ in saved.values()]
        self._tables, self._epoch = list(saved), group.epoch
        self._loads = [
            PartsLoad(
                group,
                table,
                feature,
                [_part(shard) for shard in shards],
                owners,
                rows=rows,
                allow_loss=options.allow_loss,
                batch_bytes=options.batch_bytes,
                threads=options.threads,
                verify=options.verify,
            )
            for table, (_, rows, feature, shards, owners) in saved.items()
        ]

    def check(self) -> None:
        for load in self._loads:
            load.check()

    @property
    def bytes(self) -> int:
        return sum(load.bytes for load in self._loads)

    def run(self) -> dict[str, LoadCounts]:
        if not self._loads:
            return {}
        without = [load.name for load in self._loads if load.lacks_states]
        if without:
            warn(
                f"Tables {', '.join(map(repr, without))} were saved without optimizer states: "
                "their states start from zero."
            )
        with self._group.alone():
            # All tables of a group count steps together.
            clock = max(load.clock for load in self._loads)
            epoch = max(load.epoch for load in self._loads)
            if len(self._loads) < len(self._group.tables):
                # The tables that are not loaded keep their contents.
                clock, epoch = max(clock, self._group.clock), max(epoch, self._group.epoch)
            self._group.set_clock(clock)
            self._group.set_epoch(epoch)
            loads = zip(self._keys, self._loads, strict=True)
            return {key: LoadCounts(load.entries, load.run()) for key, load in loads}

    def undo(self) -> None:
        with self._group.alone():
            for table in self._tables:
                self._group.clear_table(table)
            self._group.set_clock(0)
            self._group.set_epoch(self._epoch)


def saved_folder(folder: Path) -> SavedFolder:
    """Implements :meth:`Backend.saved_folder`."""
    manifest = Manifest.read(folder)
    begin = manifest.table["column_offset"]
    return SavedFolder(
        manifest.save,
        manifest.entries,
        manifest.crc32,
        (begin, begin + manifest.table["dim"]),
        tuple(manifest.files),
        manifest.changes is None,
        frozenset(shard.file for shard in manifest.shards),
    )


def merge_files(layers: Sequence[Path], folder: Path, options: FileOptions) -> None:
    """Implements :meth:`Backend.merge_files`."""
    merge_layers([(layer, Manifest.read(layer)) for layer in layers], folder, options.batch_bytes)


def verify_file(saved: SavedShard, file: str, options: FileOptions) -> None:
    """Implements :meth:`Backend.verify_file`."""
    folder = saved.folder
    manifest = Manifest.read(folder)
    batch_bytes = options.batch_bytes // options.threads
    if manifest.counts is not None and file == manifest.counts.file:
        verify_counts(folder, manifest.counts, batch_bytes)
    if manifest.changes is not None and file == manifest.changes.left_file:
        slots = manifest.buckets * manifest.bucket_slots
        verify_removed_ids(folder, manifest.changes, slots, batch_bytes)
    for shard in manifest.shards:
        if file == shard.file:
            verify_shard(folder, manifest, shard, batch_bytes, saved.owners)
