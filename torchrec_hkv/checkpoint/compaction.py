"""Merges a chain of deltas into a complete checkpoint, without a model."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Chain, Link, digest_of
from torchrec_hkv.checkpoint.layers import Layers, files_to_verify, saved_shards
from torchrec_hkv.checkpoint.record import TENSORS, Record, TableRecord, TableShardRecord
from torchrec_hkv.checkpoint.tensors import file_size, verify_file
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.progress import TaskProgress, advance, reported

#: Default memory limit of a merge, in bytes.
BATCH_BYTES = 512 << 20


def compact(
    path: str | os.PathLike[str],
    into: str | os.PathLike[str] | None = None,
    *,
    batch_bytes: int = BATCH_BYTES,
    threads: int = 4,
) -> Path:
    """Merges a base and its deltas into one complete checkpoint with the same contents.

    Needs no model and no process group; with a process group, only one rank calls it. The chain is
    not changed. Files that need no merge are linked, or copied to another file system.

    Args:
        path: the folder of a chain, or of the last delta to merge.
        into: the folder of the new checkpoint. An earlier checkpoint there is replaced. None adds
            it to the chain as a new base; ``path`` must then name the whole chain or its newest
            checkpoint. No process may write to the chain meanwhile. Afterwards, create a new
            :class:`DeltaWriter` and call its ``resume()``.
        batch_bytes: memory limit in bytes. One more byte is used per slot of a table's shard.
        threads: number of threads that verify files.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: ``path`` is not of a chain, a file of the chain is missing, damaged or of
            another chain, or ``into`` holds something other than a checkpoint. Nothing is written
            then.
        OSError: writing failed; what was written is removed.
    """
    path, options = Path(path), FileOptions(batch_bytes, threads)
    chain = Chain.at(path)
    if chain is None:
        raise ValueError(f"There is no chain of deltas at {path}: name a DeltaWriter's folder.")
    layers = chain.layers()
    if into is None:
        link = Link.read(layers[0][0])
        # The newest checkpoint may not be named in deltas.json, if its writer was killed before.
        if link.number + 1 != Chain(layers[0][0].parent).next_number():
            raise ValueError(
                f"{layers[0][0]} is not the newest checkpoint of its chain: pass into=."
            )
        if link.kind == "base":
            return layers[0][0]
    root = layers[0][0].parent
    link = None if into is not None else Link(Chain(root).next_number(), "base", None)
    place = AtomicFolder(root / link.name if link is not None else Path(str(into)))
    place.remove_token(place.prepare())
    try:
        with reported("Compacting") as task:
            _verify(layers, options, task)
            _write(layers, place.saving, options, link)
    except BaseException:
        place.discard()
        raise
    place.commit()
    if link is not None:
        Chain(root).name_newest(link, digest_of(place.path))
    return place.path


def _verify(layers: Layers, options: FileOptions, task: TaskProgress) -> None:
    folder, record = layers[0]
    jobs: list[tuple[int, Callable[[], None]]] = [
        (file.bytes, lambda name=name, file=file: verify_file(folder / name, file))
        for name, file in record.files.items()
    ]
    jobs += [
        (
            file_size(saved.folder / name),
            lambda backend=backend, saved=saved, name=name: registry.get(backend).verify_file(
                saved, name, options
            ),
        )
        for backend, saved, name in files_to_verify(layers, record.tables)
    ]
    # Entries are read once for their checksums, and once more for the merge.
    of_tensors = sum(file.bytes for file in record.files.values())
    task.set_total(2 * sum(size for size, _ in jobs) - of_tensors)
    with ThreadPoolExecutor(options.threads) as pool:
        for size, future in [(size, pool.submit(job)) for size, job in jobs]:
            future.result()
            advance(size)


def _write(layers: Layers, folder: Path, options: FileOptions, link: Link | None) -> None:
    source, record = layers[0]
    _link_tree(source / TENSORS, folder / TENSORS)
    tables = {key: _write_table(layers, key, folder, options) for key in record.tables}
    if link is not None:
        link.write(folder)
    merged: Record = dataclasses.replace(record, tables=tables)
    merged.write(folder)
    sync_folder(folder)


def _write_table(layers: Layers, key: str, folder: Path, options: FileOptions) -> TableRecord:
    table = layers[0][1].tables[key]
    if table.shards is None:
        return table
    backend = registry.get(table.backend)
    shards: list[TableShardRecord] = []
    for shard, saved in zip(table.shards, saved_shards(layers, key), strict=True):
        to = folder / shard.folder
        if saved.earlier:
            to.parent.mkdir(parents=True, exist_ok=True)
            backend.merge_files([saved.folder, *saved.earlier], to, options)
            folder_record = backend.saved_folder(to)
            shards.append(
                dataclasses.replace(shard, entries=folder_record.entries, crc32=folder_record.crc32)
            )
        else:
            _link_tree(saved.folder, to)
            shards.append(shard)
        for parent in (to.parent, to.parent.parent):
            sync_folder(parent)
    return dataclasses.replace(table, shards=shards)


def _link_tree(source: Path, to: Path) -> None:
    """Links the files of a folder into another one. These files are never changed in place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, to, copy_function=_link)
    sync_folder(to)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, to)
        with open(to, "rb") as file:
            os.fsync(file.fileno())
