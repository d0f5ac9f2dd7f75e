"""Writes files of entries by owner bucket, for blocking and non-blocking saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import progress
from torchrec_hkv.hash_table.files.block_files import copy_to_host
from torchrec_hkv.hash_table.files.file_names import shard_name
from torchrec_hkv.hash_table.files.file_source import FileSource
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile
from torchrec_hkv.hash_table.files.shard_files import (
    ShardWriter,
    Staging,
    compressed,
    entry_bytes,
)
from torchrec_hkv.hash_table.files.zstd_files import SUFFIX
from torchrec_hkv.progress import advance
from torchrec_hkv.write_behind import SaveHandle


class RangeWriter:
    """Writes the entries of a range of owner buckets in batches.

    Args:
        name: name of the table in messages.
        owners: range ``[first, end)`` of owner buckets.
        files: paths of the files, with the number of entries of each.
        staging: pool of memory for batches.
        written: list to which files are appended when they are created.
        compression: whether to compress the files after they are written.
    """

    def __init__(
        self,
        name: str,
        owners: tuple[int, int],
        files: list[tuple[Path, int]],
        staging: StagingPool,
        written: list[Path],
        compression: bool,
    ) -> None:
        self.owners = owners
        #: Descriptions of the written files for the manifest.
        self.shards: list[ShardFile] = []
        self._name, self._pool, self._compression = name, staging, compression
        self._to_come, self._written = list(reversed(files)), written
        self._staging: Staging | None = None
        self._writer: ShardWriter | None = None
        self._memory: dict[str, Tensor] = {}  # of the batch that is being filled
        self._filled = 0

    def put(self, batch: dict[str, Tensor]) -> None:
        """Adds entries.

        Args:
            batch: tensors in host memory, or on a GPU, which are copied in the current stream.

        Raises:
            OSError: writing failed.
            RuntimeError: there are more entries than planned.
        """
        n, at = len(batch["ids"]), 0
        device = batch["ids"].device
        while at < n:
            if self._writer is None:
                self._begin_file()
            capacity = len(self._memory["ids"])
            end = min(n, at + capacity - self._filled)
            for name, to in self._memory.items():
                copy_to_host(to[self._filled : self._filled + end - at], batch[name][at:end])
            self._filled += end - at
            at = end
            if self._filled == capacity:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                self._write()

    def _begin_file(self) -> None:
        if not self._to_come:
            raise RuntimeError(f"table {self._name!r} changed while it was saved.")
        path, entries = self._to_come.pop()
        self._written.append(path)
        if self._staging is None:
            self._staging = self._pool.take()
        self._path = path
        self._writer = ShardWriter(path, self._staging, self.owners, entries)
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._memory = self._writer.memory(
            min(self._writer.remaining_entries, self._staging.entries)
        )
        self._filled = 0

    def _write(self) -> None:
        writer = self._writer
        writer.write(self._filled)
        advance(self._filled * entry_bytes(self._staging.fields))
        if writer.remaining_entries:
            self._begin_batch()
            return
        shard = writer.finish()
        self._end_file()
        if self._compression:
            self._written.append(self._path.with_name(self._path.name + SUFFIX))
            shard = compressed(self._path, shard)
        self.shards.append(shard)

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.__exit__()
            self._writer = None

    def finish(self) -> list[ShardFile]:
        """Finishes the files after the last entry; returns :attr:`shards`.

        Raises:
            RuntimeError: there were fewer entries than planned.
        """
        if self._writer is not None or self._to_come:
            raise RuntimeError(f"table {self._name!r} changed while it was saved.")
        return self.shards

    def close(self) -> None:
        """Closes the files, also after an error."""
        self._end_file()
        if self._staging is not None:
            self._pool.put(self._staging)
            self._staging = None


class StagingPool:
    """A pool of memory for batches that are being written.

    Args:
        make: allocates one more batch.
    """

    def __init__(self, make: Callable[[], Staging]) -> None:
        self._make = make
        self._free: list[Staging] = []

    def take(self) -> Staging:
        """Returns a batch that is not in use."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def put(self, staging: Staging) -> None:
        """Returns a batch to the pool."""
        self._free.append(staging)


def range_writers(
    source: FileSource,
    plan: list[tuple[int, int, int]],
    folder: Path,
    save_name: str,
    written: list[Path],
    staging: StagingPool,
    compression: bool,
) -> list[RangeWriter]:
    """The writers of a table's files.

    Args:
        source: the table.
        plan: result of :func:`~torchrec_hkv.hash_table.files.shard_plan.plan_shards`.
        folder: an existing folder.
        save_name: 8 hexadecimal digits, unique for the save.
        written: list to which files are appended when they are created.
        staging: pool of memory for all files.
        compression: whether to compress the files after they are written.
    """
    work: dict[tuple[int, int], list[tuple[Path, int]]] = {}
    for index, (begin, end, entries) in enumerate(plan):
        path = folder / shard_name(save_name, index)
        work.setdefault((begin, end), []).append((path, entries))
    return [
        RangeWriter(source.name, owners, files, staging, written, compression)
        for owners, files in work.items()
    ]


def write_shards(source: FileSource, writers: list[RangeWriter], threads: int) -> None:
    """Writes the shards of a table.

    While one thread waits for the disk, others read the table and compute checksums.

    Args:
        source: the table.
        writers: writers of the table's files.
        threads: number of threads that write files, each with batches of its own.

    Raises:
        OSError: writing failed.
        RuntimeError: the table changed meanwhile.
    """

    def write(writer: RangeWriter) -> None:
        try:
            for batch in source.batches(*writer.owners):
                writer.put(batch)
            writer.finish()
        finally:
            writer.close()

    if threads == 1:
        for writer in writers:
            write(writer)
    else:
        with ThreadPoolExecutor(
            threads, initializer=progress.use_progress, initargs=(progress.current(),)
        ) as pool:
            list(pool.map(write, writers))


def copy_shards(source: FileSource, writers: list[RangeWriter], handle: SaveHandle) -> None:
    """Copies the entries of a table. The threads of a non-blocking save write the copies.

    Args:
        source: the table.
        writers: writers of the table's files. Their ``shards`` are complete after the deferred
            work.
        handle: handle of the save.
    """
    device = source.group.device
    for batch, counts, on_device in source.pieces([w.owners for w in writers], handle):
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        size = sum(counts) * entry_bytes(source.fields)
        jobs, first = [], 0
        for writer, count in zip(writers, counts, strict=True):
            part = {name: tensor[first : first + count] for name, tensor in batch.items()}
            first += count
            if count:
                jobs.append((writer, functools.partial(_put, writer, part, event, device)))
        if jobs:
            sizes = (0, size) if on_device else (size, 0)
            handle.defer_all(jobs, *sizes)
        advance(size)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for writer in writers:
        handle.defer(writer.finish, lane=writer)
        handle.defer(writer.close, lane=writer, always=True)


def _put(
    writer: RangeWriter,
    batch: dict[str, Tensor],
    event: torch.cuda.Event | None,
    device: torch.device,
) -> None:
    """Writes a batch after it was copied from the GPU, in another stream than training's."""
    if event is None:
        writer.put(batch)
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        event.synchronize()  # the host reads the batch from host memory
        writer.put(batch)
        stream.synchronize()  # frees the batch's memory
