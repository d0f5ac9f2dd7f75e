"""Files read and written in whole blocks past the page cache, and memory that such blocks fit.

A table is larger than what a page cache should hold, and each of its bytes is needed once. Going
past the cache saves a copy, pages that have to be found first, and a disk that waits until a
kernel begins to write back: on virtual machines that is most of the time of a save. File systems
that don't offer it are read and written as usual.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import torch
from torch import Tensor

#: Where blocks begin, in files and in memory; a multiple of what disks ask for.
BLOCK = 4096
# What a file system or a device says that can't do it.
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


def host_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of host memory, which they keep."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    found = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    found.tensor = tensor  # type: ignore[attr-defined]  # a view of an address owns nothing
    return memoryview(found)


def block_memory(size: int, pin: bool = False) -> Tensor:
    """uint8 host memory of so many bytes, which begins where a block may.

    Args:
        size: bytes.
        pin: memory that a GPU copies to and from without help.
    """
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pin)
    return memory[-memory.data_ptr() % BLOCK :][:size]


def copy_to_host(to: Tensor, source: Tensor) -> None:
    """Copies a contiguous tensor to one of host memory, without waiting for a GPU.

    Args:
        to: of the shape and dtype of ``source``, contiguous; pinned where that is on a GPU.
        source: must outlive the copy.
    """
    if source.is_cuda:
        to.copy_(source, non_blocking=True)
    else:
        # Several threads copy at a time: none should have threads of its own.
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


class BlockFile:
    """An open file.

    Args:
        path: of the file.
        flags: of ``os.open``.
        direct: whole blocks go past the page cache, where the file system can.

    Raises:
        OSError: it can't be opened.
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
        """Whether whole blocks go past the page cache."""
        return self._direct is not None

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file).st_size

    def write_blocks(self, data: memoryview, at: int) -> None:
        """Writes whole blocks of :func:`block_memory`."""
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
        """Writes any bytes, through the page cache."""
        data = memoryview(data)
        while data.nbytes:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def read_blocks(self, data: memoryview, at: int, needed: int) -> int:
        """Reads whole blocks to :func:`block_memory`.

        Args:
            data: where to; as many bytes as the blocks have.
            at: where in the file they begin.
            needed: bytes of the first ones that must be there; what follows may be past the end.

        Returns:
            Bytes that were read, fewer than ``needed`` where the file ends before.
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
        """Reads any bytes, through the page cache."""
        return os.pread(self._file, size, at)

    def read_into(self, data: memoryview, at: int) -> int:
        """Reads any bytes, through the page cache; returns how many there were."""
        return os.preadv(self._file, [data], at)

    def sync(self) -> None:
        """Makes sure that the file is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes it."""
        for file in (self._direct, self._file):
            if file is not None:
                os.close(file)
        self._direct = None

    def _give_up_direct(self, error: OSError) -> None:
        if self._direct is None or error.errno not in _NOT_DIRECT:
            raise error
        os.close(self._direct)
        self._direct = None
