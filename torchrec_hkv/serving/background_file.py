"""A file that another thread writes, while the next pieces are made."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.serving import ops  # noqa: F401  registers the ops

#: Bytes of a buffer.
BUFFER_BYTES = 8 << 20
_WAITING = 2


class BackgroundFile:
    """Writes pieces of a new file in the order in which they are given.

    Args:
        path: path of the file, which must not exist.
        keeps: whether the file is to be kept, so that the disk should begin to write at once.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, path: Path, keeps: bool = True) -> None:
        self._keeps = keeps
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._waiting: deque[Future[None]] = deque()
        size = BUFFER_BYTES * (_WAITING + 1)
        memory = torch.ops.torchrec_hkv.serving_memory(size)
        self._buffers = deque(memory.split(BUFFER_BYTES))
        self._crc32: dict[str, int] = {}

    def buffer(self, rows: int, row_bytes: int) -> Tensor:
        """Memory for a piece, uint8 ``[rows, row_bytes]``, at most :data:`BUFFER_BYTES`. It is for
        another piece when two further ones have been given."""
        self._buffers.rotate(-1)
        return self._buffers[0][: rows * row_bytes].view(rows, row_bytes)

    def write(self, data: Tensor, at: int, part: str | None = None) -> None:
        """Writes a contiguous tensor at offset ``at``, and adds it to the checksum of a part of the
        file. The tensor must not change until two further pieces have been given.

        Raises:
            OSError: an earlier piece could not be written.
        """
        if len(self._waiting) == _WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._write, data, at, part))

    def flush(self) -> None:
        """Waits until all pieces are in the file.

        Raises:
            OSError: a piece could not be written.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def sync(self) -> None:
        """Flushes the file to the disk.

        Raises:
            OSError: a piece could not be written.
        """
        self.flush()
        os.fsync(self._file)

    def truncate(self, size: int) -> None:
        """Sets the size of the file."""
        os.truncate(self._file, size)

    def read(self, data: Tensor, at: int) -> None:
        """Reads what was written at offset ``at`` into a contiguous tensor."""
        into = memoryview(data.view(torch.uint8).flatten().numpy())
        while into.nbytes:
            got = os.preadv(self._file, [into], at)
            if got == 0:
                raise OSError(f"a temporary file ends at byte {at}")
            into, at = into[got:], at + got

    def crc32(self, part: str) -> int:
        """Checksum of a part of the file, after :meth:`flush`."""
        return self._crc32.get(part, 0)

    def _write(self, data: Tensor, at: int, part: str | None) -> None:
        left = memoryview(data.view(torch.uint8).flatten().numpy())
        if part is not None:
            self._crc32[part] = zlib.crc32(left, self._crc32.get(part, 0))
        begin, size = at, left.nbytes
        while left.nbytes:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written
        if self._keeps:  # starts writing to the disk; pages stay in the cache until it is done
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Waits for the thread, and closes the file."""
        self._pool.shutdown()
        os.close(self._file)


def read_ahead(items: Iterator) -> Iterator:
    """Yields what an iterator does. Another thread makes the next item while one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
