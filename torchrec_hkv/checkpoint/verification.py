"""Reads all files of a folder and reports damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchrec_hkv import progress
from torchrec_hkv.backends import registry
from torchrec_hkv.backends.save_types import FileOptions, SavedShard
from torchrec_hkv.checkpoint.layers import Layers, files_to_verify
from torchrec_hkv.checkpoint.metadata import read_metadata
from torchrec_hkv.checkpoint.record import Record
from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint
from torchrec_hkv.checkpoint.tensors import file_size, verify_file

#: A file, its size in bytes, and the function that verifies it.
Job = tuple[Path, int, Callable[[], None]]


def verify(saved: SavedCheckpoint, options: FileOptions) -> list[str]:
    """Reads all files of a folder. Verifies sizes and checksums, that each id occurs once, and that
    it is in one of its own buckets.

    Args:
        saved: a checkpoint, a chain up to one of its checkpoints, or a saved hash table.
        options: how to read the files.

    Returns:
        One sentence for each damaged file.
    """
    jobs = _jobs(saved, options)
    damage: list[str] = []

    def run(job: Job) -> None:
        path, size, check = job
        try:
            check()
        except (ValueError, OSError) as error:
            message = str(error)
            damage.append(message if str(path) in message else f"{path}: {message}")
        progress.advance(size)

    with progress.reported("Verifying", sum(size for _, size, _ in jobs)) as task:
        threads = ThreadPoolExecutor(
            options.threads, initializer=progress.use_progress, initargs=(task,)
        )
        with threads as pool:
            list(pool.map(run, jobs))
    return sorted(damage)


def _jobs(saved: SavedCheckpoint, options: FileOptions) -> list[Job]:
    jobs: list[Job] = []
    for folder, record in saved.layers:
        jobs += _tensor_jobs(folder, record)
    if saved.layers:
        jobs += _table_jobs(saved.layers, options)
    for table in saved.tables.values() if saved.kind == "table" else ():
        for part in table.parts or ():
            shard = SavedShard(part.folder, part.owners)
            jobs += [_job(table.backend, shard, name, options) for name in part.manifest.files]
    return jobs


def _tensor_jobs(folder: Path, record: Record) -> list[Job]:
    jobs: list[Job] = [
        (
            folder / name,
            file.bytes,
            lambda path=folder / name, file=file: verify_file(path, file),
        )
        for name, file in record.files.items()
    ]
    jobs.append((folder, 0, lambda: _check_metadata(folder, record)))
    return jobs


def _check_metadata(folder: Path, record: Record) -> None:
    read_metadata(folder, record.files)


def _table_jobs(layers: Layers, options: FileOptions) -> list[Job]:
    return [
        _job(backend, saved, name, options)
        for backend, saved, name in files_to_verify(layers, layers[0][1].tables)
    ]


def _job(backend: str, saved: SavedShard, name: str, options: FileOptions) -> Job:
    path = saved.folder / name
    return path, file_size(path), lambda: registry.get(backend).verify_file(saved, name, options)
