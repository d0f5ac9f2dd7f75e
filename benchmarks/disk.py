"""Measures sequential writes and reads of a disk: files of random bytes, by several threads."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torchrec_hkv.hash_table.files.block_files import BLOCK, BlockFile, block_memory, host_memory

PIECE = 16 << 20


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a folder's disk, in bytes per second.

    Attributes:
        write: rate of writes including the sync.
        read: rate of reads from the disk, not from the page cache.
    """

    write: float
    read: float


def sequential_rates(
    folder: Path, size: int, threads: int, *, direct: bool, seconds: float = float("inf")
) -> Rates:
    """Writes new files, one per thread, syncs them, and reads them again.

    Args:
        folder: folder for the files, which are deleted at the end.
        size: total bytes of all files.
        threads: number of concurrent threads.
        direct: whether to bypass the page cache if the file system supports this.
        seconds: time limit of writing, and of reading.
    """
    pieces = max(1, size // threads // PIECE)
    piece = max(BLOCK, min(PIECE, size // threads // BLOCK * BLOCK))
    paths = [folder / f"sequential-{index}" for index in range(threads)]
    memory = [block_memory(piece) for _ in range(threads)]
    for one in memory:
        one.copy_(torch.randint(256, (piece,), dtype=torch.uint8))

    def write(index: int, deadline: float) -> int:
        file = BlockFile(paths[index], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        transfer = file.write_blocks if direct else file.write
        data = host_memory(memory[index])
        done = 0
        for at in range(0, pieces * piece, piece):
            if done and time.perf_counter() > deadline:
                break
            transfer(data, at)
            done += piece
        file.sync()
        file.close()
        return done

    def read(index: int, deadline: float) -> int:
        file = BlockFile(paths[index], os.O_RDONLY)
        data = host_memory(memory[index])
        done = 0
        for at in range(0, file.size(), piece):
            if done and time.perf_counter() > deadline:
                break
            if direct:
                file.read_blocks(data, at, piece)
            else:
                file.read_into(data, at)
            done += piece
        file.close()
        return done

    def rate(work: Callable[[int, float], int]) -> float:
        begin = time.perf_counter()
        done = sum(pool.map(work, range(threads), [begin + seconds] * threads))
        return done / (time.perf_counter() - begin)

    try:
        with ThreadPoolExecutor(threads) as pool:
            written = rate(write)
            drop_from_cache(folder)
            return Rates(written, rate(read))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def drop_from_cache(folder: Path) -> None:
    """Drops files from the page cache, so that the next reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
