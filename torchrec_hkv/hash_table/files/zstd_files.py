"""Shards compressed with Zstandard, with random access.

A file is a sequence of frames, each of 1 MiB of the shard, and the seek table of Zstandard's
seekable format. ``zstd -d`` restores the shard. The package ``zstandard`` is only needed to write
and read such files.
"""

from __future__ import annotations

import importlib
import io
import os
import struct
from pathlib import Path
from types import ModuleType

#: Suffix of the names of compressed shards.
SUFFIX = ".zst"
_FRAME_BYTES = 1 << 20
_LEVEL = 3
# Zstandard's seekable format: a skippable frame of entries and a footer. Its optional checksums are
# not used, because the shard's manifest has checksums.
_SKIPPABLE, _SEEKABLE = 0x184D2A5E, 0x8F92EAB1
_HEAD, _ENTRY, _FOOTER = struct.Struct("<II"), struct.Struct("<II"), struct.Struct("<IBI")


def zstandard(what: str) -> ModuleType:
    """The package ``zstandard``.

    Args:
        what: what needs the package, as the beginning of the message.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ValueError(
            f"{what} needs the package zstandard, which is not installed: pip install zstandard."
        ) from None


def compress(path: Path, into: Path) -> None:
    """Writes a compressed copy of a file to a new file, and flushes it to the disk."""
    compressor = zstandard("compression='zstd'").ZstdCompressor(level=_LEVEL)
    sizes = []
    with open(path, "rb") as source, open(into, "xb") as target:
        while data := source.read(_FRAME_BYTES):
            frame = compressor.compress(data)
            target.write(frame)
            sizes.append((len(frame), len(data)))
        target.write(_HEAD.pack(_SKIPPABLE, len(sizes) * _ENTRY.size + _FOOTER.size))
        for entry in sizes:
            target.write(_ENTRY.pack(*entry))
        target.write(_FOOTER.pack(len(sizes), 0, _SEEKABLE))
        target.flush()
        os.fsync(target.fileno())


class ZstdFile:
    """A compressed file with the reading methods of
    :class:`~torchrec_hkv.hash_table.files.block_files.BlockFile`. Several threads may read.

    Args:
        path: path of the file.

    Raises:
        ValueError: the file or its seek table is damaged, or the package ``zstandard`` is missing.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._zstandard = zstandard(str(path))
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._begins = self._read_table()
        except BaseException:
            os.close(self._file)
            raise

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {why}.")

    def _read_table(self) -> list[int]:
        """Offsets of the frames in the file, and the end of the last one."""
        size = os.fstat(self._file).st_size
        footer = os.pread(self._file, _FOOTER.size, max(0, size - _FOOTER.size))
        if len(footer) < _FOOTER.size:
            raise self._damaged("it ends within its table of frames")
        frames, flags, magic = _FOOTER.unpack(footer)
        length = frames * _ENTRY.size + _FOOTER.size
        start = size - length - _HEAD.size
        if magic != _SEEKABLE or flags != 0 or start < 0:
            raise self._damaged("it does not end with a table of frames")
        if _HEAD.unpack(os.pread(self._file, _HEAD.size, start)) != (_SKIPPABLE, length):
            raise self._damaged("its table of frames begins elsewhere")
        table = os.pread(self._file, frames * _ENTRY.size, start + _HEAD.size)
        begins, sizes = [0], []
        for compressed, bytes_held in _ENTRY.iter_unpack(table):
            begins.append(begins[-1] + compressed)
            sizes.append(bytes_held)
        # All frames except the last have full size.
        if begins[-1] != start or any(n != _FRAME_BYTES for n in sizes[:-1]):
            raise self._damaged("its table names other frames than it has")
        if sizes and not 0 < sizes[-1] <= _FRAME_BYTES:
            raise self._damaged("its table names an impossible frame")
        self._size = sum(sizes)
        return begins

    def size(self) -> int:
        """Uncompressed size in bytes."""
        return self._size

    def read(self, size: int, at: int) -> bytes:
        """Reads bytes; fewer if the shard ends before."""
        end = min(at + size, self._size)
        if at >= end:
            return b""
        first, last = at // _FRAME_BYTES, -(-end // _FRAME_BYTES)
        data = b"".join(self._frame(frame) for frame in range(first, last))
        return data[at - first * _FRAME_BYTES : end - first * _FRAME_BYTES]

    def read_blocks(self, data: memoryview, at: int, needed: int) -> int:
        """Reads ``needed`` bytes, fewer if the shard ends before; returns their number."""
        return io.BytesIO(self.read(needed, at)).readinto(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _frame(self, number: int) -> bytes:
        begin, end = self._begins[number], self._begins[number + 1]
        size = min(_FRAME_BYTES, self._size - number * _FRAME_BYTES)
        compressed = os.pread(self._file, end - begin, begin)
        try:
            data = self._zstandard.ZstdDecompressor().decompress(
                compressed, max_output_size=_FRAME_BYTES
            )
        except self._zstandard.ZstdError as error:
            raise self._damaged(f"frame {number} can't be decompressed ({error})") from None
        if len(data) != size:
            raise self._damaged(f"frame {number} holds {len(data)} bytes instead of {size}")
        return data
