"""Reads the files of mapped tables into the page cache while the first requests are answered.

A row that is not in the cache is read when it is looked up, which waits for the disk. Reading in
sequence is faster by orders of magnitude, so it soon overtakes the requests.

The cache uses huge pages if the system and the file system support them. Random lookups are then
faster, because address translation is. If a lookup has read a small page of a range of 2 MB before,
the whole range stays in small pages. Lookups therefore read huge pages, too, if tables are small.
In large tables this would delay the first requests.
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
# A disk of 1 GB/s reads this in a second.
_HUGE_BYTES = 1 << 30
_MEMORY = Path("/proc/meminfo")


def warm(
    folder: Path,
    files: Sequence[tuple[TableFile, Tensor]],
    available: int | None = None,
    huge_bytes: int = _HUGE_BYTES,
) -> threading.Thread | None:
    """Prepares mapped tables for lookups at random.

    Args:
        folder: folder of the files.
        files: files, each with its index as :meth:`TableFile.map` returned it.
        available: available memory in bytes; None to ask the system.
        huge_bytes: largest total size of files for which lookups read huge pages.

    Returns:
        A thread that reads the files into the page cache, indexes first. None if the files take
        more than half of the available memory, or another export has replaced them: the cache then
        fills with the pages that are looked up.
    """
    available = _available_bytes() if available is None else available
    total = sum(file.num_bytes for file, _ in files)
    is_read = total <= available // 2
    for _, index in files:
        _ops.serving_expect_random(index, is_read and total <= huge_bytes)
    if not is_read:
        return None
    opened: list[int] = []
    try:
        for file, _ in files:
            opened.append(os.open(folder / file.file, os.O_RDONLY))
    except OSError:
        for number in opened:
            os.close(number)
        return None
    mapped = [(number, *slices) for number, slices in zip(opened, files, strict=True)]
    thread = threading.Thread(target=_read, args=(mapped,), name="warm", daemon=True)
    thread.start()
    return thread


def _read(files: Sequence[tuple[int, TableFile, Tensor]]) -> None:
    """Reads the indexes and then the rows of files, and closes them."""
    for part in range(2):
        for opened, file, index in files:
            begin, end = ((0, file.rows_at), (file.rows_at, file.num_bytes))[part]
            while begin < end:
                # Pieces begin at multiples of their size, because huge pages are aligned to 2 MB.
                stop = min(begin + _PIECE - begin % _PIECE, end)
                if not _ops.serving_read_pages(index, begin, stop):  # Linux before 5.14
                    os.posix_fadvise(opened, begin, stop - begin, os.POSIX_FADV_WILLNEED)
                begin = stop
    for opened, _, _ in files:
        os.close(opened)


def _available_bytes() -> int:
    """Bytes of memory that can be used without swapping; 0 if unknown."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0
