"""A file that another thread writes, bypassing the page cache, while the next pieces are made."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.hash_table.files.block_files import BLOCK, BlockFile, block_memory, host_memory

#: Largest number of bytes in a piece.
PIECE_BYTES = 4 << 20
_STREAMS, _WAITING = 2, 2
_DIRECT_BYTES = 64 << 20


class BackgroundFile:
    """A new file that is written by streams. Each stream writes a range of bytes in order.

    Args:
        path: path of the file, which must not exist.
        size: least number of bytes that will be written; small files use the page cache.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._file = BlockFile(path, flags, direct=size >= _DIRECT_BYTES)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._waiting: deque[tuple[Future[None], Tensor]] = deque()
        self._free = [block_memory(2 * PIECE_BYTES) for _ in range(_WAITING + _STREAMS)]

    def stream(self, at: int) -> FileStream:
        """A stream that begins at offset ``at``, a multiple of 4096; at most two at a time."""
        return FileStream(self, at)

    def sync(self) -> None:
        """Flushes the file to the disk, after all streams.

        Raises:
            OSError: a piece could not be written.
        """
        self._wait(0)
        self._file.sync()

    def read(self, data: Tensor, at: int) -> None:
        """Reads written bytes from offset ``at`` on into a uint8 vector."""
        self._wait(0)
        scratch, done = self._free[0], 0
        while done < data.numel():
            begin = at + done
            lead = begin % BLOCK
            n = min(data.numel() - done, PIECE_BYTES)
            blocks = scratch[: lead + n + -(lead + n) % BLOCK]
            if self._file.read_blocks(host_memory(blocks), begin - lead, lead + n) < lead + n:
                raise OSError(f"a temporary file ends before byte {begin + n}")
            data[done : done + n] = blocks[lead : lead + n]
            done += n

    def close(self) -> None:
        """Waits for the thread, and closes the file."""
        self._pool.shutdown()
        self._file.close()

    def _take(self) -> Tensor:
        """A free buffer."""
        if not self._free:
            self._wait(len(self._waiting) - 1)
        return self._free.pop()

    def _submit(self, stream: FileStream, buffer: Tensor, size: int, at: int) -> None:
        """Makes the thread write the first bytes of a buffer, which is free afterwards."""
        self._wait(_WAITING - 1)
        self._waiting.append((self._pool.submit(self._write, stream, buffer[:size], at), buffer))

    def _wait(self, max_pending: int) -> None:
        while len(self._waiting) > max_pending:
            written, buffer = self._waiting.popleft()
            written.result()
            self._free.append(buffer)

    def _write(self, stream: FileStream, data: Tensor, at: int) -> None:
        memory = host_memory(data)
        stream.crc32 = checksums.crc32(memory, stream.crc32)
        block_bytes = memory.nbytes - memory.nbytes % BLOCK
        self._file.write_blocks(memory[:block_bytes], at)
        self._file.write(memory[block_bytes:], at + block_bytes)


class FileStream:
    """A range of bytes of a :class:`BackgroundFile`.

    Attributes:
        crc32: checksum of the bytes, after :meth:`BackgroundFile.sync`.
    """

    def __init__(self, file: BackgroundFile, at: int) -> None:
        self._file, self._at = file, at
        self._buffer, self._filled = file._take(), 0
        self.crc32 = 0

    @property
    def end(self) -> int:
        """Offset after the last written byte."""
        return self._at + self._filled

    def memory(self, size: int) -> Tensor:
        """Memory for the next bytes, at most :data:`PIECE_BYTES`: uint8 ``[size]``."""
        return self._buffer[self._filled : self._filled + size]

    def write(self, size: int) -> None:
        """Writes bytes that were put into :meth:`memory`.

        Raises:
            OSError: an earlier piece could not be written.
        """
        self._filled += size
        if self._filled < PIECE_BYTES:
            return
        block_bytes = self._filled - self._filled % BLOCK
        full, rest = self._buffer, self._filled - block_bytes
        self._buffer = self._file._take()
        self._buffer[:rest] = full[block_bytes : block_bytes + rest]
        self._file._submit(self, full, block_bytes, self._at)
        self._at, self._filled = self._at + block_bytes, rest

    def append(self, data: Tensor) -> None:
        """Writes the bytes of a uint8 vector."""
        for piece in data.split(PIECE_BYTES):
            self.memory(piece.numel()).copy_(piece)
            self.write(piece.numel())

    def finish(self) -> None:
        """Writes the remaining bytes and ends the stream.

        Raises:
            OSError: an earlier piece could not be written.
        """
        self._file._submit(self, self._buffer, self._filled, self._at)
        self._at, self._filled = self.end, 0


def read_ahead(items: Iterator) -> Iterator:
    """Yields the items of an iterator. Another thread makes the next item while one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
