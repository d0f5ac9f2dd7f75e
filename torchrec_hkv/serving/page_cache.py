"""Reads the files of mapped tables into the page cache while the first requests are answered.

A row that is not in the cache is read when it is looked up, which waits for the disk. Reading in
sequence is faster by orders of magnitude, so it soon overtakes the requests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.serving.table_file import TableFile

_ops = torch.ops.torchrec_hkv
_PIECE = 8 << 20
_MEMORY = Path("/proc/meminfo")


def warm(
    folder: Path, files: Sequence[tuple[TableFile, Tensor]], available: int | None = None
) -> threading.Thread | None:
    """Prepares mapped tables for lookups at random.

    Args:
        folder: folder of the files.
        files: files, each with its index as :meth:`TableFile.map` returned it.
        available: memory that is available, in bytes; None: what the system tells.

    Returns:
        A thread that reads the files into the page cache, indexes first. None if they take more
        than half of the memory that is available, or another export has replaced them: the cache
        then fills with what is looked up.
    """
    for _, index in files:
        _ops.serving_expect_random(index)
    available = _available_bytes() if available is None else available
    if sum(file.num_bytes for file, _ in files) > available // 2:
        return None
    opened: list[int] = []
    try:
        for file, _ in files:
            opened.append(os.open(folder / file.file, os.O_RDONLY))
    except OSError:
        for number in opened:
            os.close(number)
        return None
    ends = [(file.rows_at, file.num_bytes) for file, _ in files]
    thread = threading.Thread(target=_read, args=(opened, ends), name="warm", daemon=True)
    thread.start()
    return thread


def _read(files: Sequence[int], ends: Sequence[tuple[int, int]]) -> None:
    """Reads the indexes and then the rows of files, and closes them."""
    for part in range(2):
        for file, its in zip(files, ends, strict=True):
            begin = its[0] if part else 0
            for at in range(begin, its[part], _PIECE):
                os.posix_fadvise(file, at, min(_PIECE, its[part] - at), os.POSIX_FADV_WILLNEED)
    for file in files:
        os.close(file)


def _available_bytes() -> int:
    """Memory that can be used without swapping; 0 if the system doesn't tell."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0
