"""Direct I/O: files that are read and written in whole blocks without the page cache.

A table is larger than what a page cache should hold, and each byte is used once. Bypassing the
cache saves a copy, the allocation of pages, and waiting for the kernel's write-back, which on
virtual machines takes most of the time of a save. File systems without direct I/O use the page
cache.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

#: Alignment of blocks in files and in memory; a multiple of what disks require.
BLOCK = 4096
# Memory of this size or more uses huge pages if the system has them. They cause fewer page faults,
# and direct I/O has fewer pages to look up.
_HUGE_BYTES = 2 << 20
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
# Errors of file systems and devices without direct I/O.
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


def host_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. The view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    found = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    found.tensor = tensor  # type: ignore[attr-defined]  # a view of an address owns nothing
    return memoryview(found)


def block_memory(size: int, pin: bool = False) -> Tensor:
    """uint8 host memory that is aligned to :data:`BLOCK`.

    Args:
        size: number of bytes.
        pin: whether to allocate pinned memory, for copies from and to a GPU.
    """
    if not pin and size >= _HUGE_BYTES:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _HUGE_PAGES is not None:
            pages.madvise(_HUGE_PAGES)
        return torch.frombuffer(pages, dtype=torch.uint8)
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pin)
    return memory[-memory.data_ptr() % BLOCK :][:size]


def copy_to_host(to: Tensor, source: Tensor) -> None:
    """Copies a contiguous tensor to host memory. Does not synchronize with a GPU.

    Args:
        to: contiguous CPU tensor of the same shape and dtype; pinned if ``source`` is on a GPU.
        source: the tensor to copy; must outlive the copy.
    """
    if source.is_cuda:
        to.copy_(source, non_blocking=True)
    else:
        # Tensor.copy_ would use a thread pool, but several threads call this already.
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


class BlockFile:
    """An open file.

    Args:
        path: path of the file.
        flags: flags of ``os.open``.
        direct: whether whole blocks bypass the page cache, if the file system supports it.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, flags: int, direct: bool = True) -> None:
        self._file = os.open(path, flags, 0o666)
        self._direct: int | None = None
        if not direct:
            return
        try:
            self._direct = os.open(path, (flags & os.O_ACCMODE) | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                os.close(self._file)
                raise

    @property
    def is_direct(self) -> bool:
        """Whether whole blocks bypass the page cache."""
        return self._direct is not None

    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file).st_size

    def write_blocks(self, data: memoryview, at: int) -> None:
        """Writes whole blocks from :func:`block_memory` at offset ``at``."""
        while data.nbytes:
            if self._direct is None:
                self.write(data, at)
                return
            try:
                written = os.pwrite(self._direct, data, at)
            except OSError as error:
                self._give_up_direct(error)
                continue
            data, at = data[written:], at + written

    def write(self, data: memoryview | bytes, at: int) -> None:
        """Writes bytes at offset ``at`` through the page cache."""
        data = memoryview(data)
        while data.nbytes:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def read_blocks(self, data: memoryview, at: int, needed: int) -> int:
        """Reads whole blocks into :func:`block_memory`.

        Args:
            data: destination; its size is that of the blocks.
            at: offset of the blocks in the file.
            needed: number of bytes that must be read; the bytes after them may be past the end.

        Returns:
            Number of bytes read; fewer than ``needed`` if the file ends before.
        """
        got = 0
        while got < needed:
            file = self._file if self._direct is None else self._direct
            try:
                read = os.preadv(file, [data[got:]], at + got)
            except OSError as error:
                self._give_up_direct(error)
                continue
            if read == 0:
                break
            got += read
        return got

    def read(self, size: int, at: int) -> bytes:
        """Reads bytes at offset ``at`` through the page cache."""
        return os.pread(self._file, size, at)

    def read_into(self, data: memoryview, at: int) -> int:
        """Reads bytes at offset ``at`` through the page cache; returns their number."""
        return os.preadv(self._file, [data], at)

    def sync(self) -> None:
        """Flushes the file to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        for file in (self._direct, self._file):
            if file is not None:
                os.close(file)
        self._direct = None

    def _give_up_direct(self, error: OSError) -> None:
        if self._direct is None or error.errno not in _NOT_DIRECT:
            raise error
        os.close(self._direct)
        self._direct = None
