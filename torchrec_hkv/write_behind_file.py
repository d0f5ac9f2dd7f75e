"""A file that the threads of a non-blocking save write."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrec_hkv import checksums
from torchrec_hkv.write_behind import SaveHandle, sync_file

# Bytes that a thread writes at a time.
_PIECE = 16 << 20


class WriteBehindFile(io.RawIOBase):
    """A new file that is written in pieces, at once or by the threads of a non-blocking save.

    It is synced when it is closed.

    Args:
        path: path of the file.
        handle: handle of a non-blocking save; None to write at once.

    Raises:
        FileExistsError: the file exists.
    """

    def __init__(self, path: Path, handle: SaveHandle | None) -> None:
        self._path, self._handle = path, handle
        self._piece = bytearray()
        self._size = 0
        #: Checksum of the bytes written so far; final when all jobs of the file have run.
        self.crc32 = 0
        self._do(lambda: open(path, "xb").close())

    def _do(self, job: Callable[[], Any], size: int = 0) -> None:
        if self._handle is None:
            job()
        else:
            self._handle.defer(job, size, lane=self._path)

    def writable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Writes bytes, or queues a copy of them. Returns their number."""
        view = memoryview(data).cast("B")
        for at in range(0, view.nbytes, _PIECE):
            self._piece += view[at : at + _PIECE]
            if len(self._piece) >= _PIECE:
                self._send()
        self._size += view.nbytes
        return view.nbytes

    def _send(self) -> None:
        piece, self._piece = self._piece, bytearray()

        def append() -> None:
            self.crc32 = checksums.crc32(piece, self.crc32)
            with open(self._path, "ab") as file:
                file.write(piece)

        if self._handle is not None:
            self._handle.reserve(len(piece))
        self._do(append, len(piece))

    def close(self) -> None:
        """Writes the rest and syncs the file."""
        if not self.closed:
            self._send()
            self._do(lambda: sync_file(self._path))
        super().close()
