"""Reads and writes tensors in folders of :mod:`torch.distributed.checkpoint`, in parts."""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_hkv.checkpoint.metadata import DCP_METADATA, read_dcp_metadata
from torchrec_hkv.checkpoint.reader import UNREADABLE, FileSlice, refusal
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.progress import advance

_DATA_FILE = "__0_0.distcp"
_PIECE = 16 << 20
#: Size of the header of a file in a zip archive up to its name, in bytes.
_ZIP_HEADER = 30

StorageEntry = TensorStorageMetadata | BytesStorageMetadata


class DcpFolder:
    """A folder that :mod:`torch.distributed.checkpoint` wrote. Reading it runs no code that a file
    names.

    Args:
        path: the folder.

    Raises:
        ValueError: its metadata is damaged, or names classes that metadata does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = read_dcp_metadata(path)
        self.entries: dict[str, StorageEntry] = dict(self.metadata.state_dict_metadata)

    def tensor(self, key: str) -> DcpTensor:
        """A tensor of the folder."""
        return DcpTensor(self, key)

    def is_tensor(self, key: str) -> bool:
        """Whether there is a tensor of this name."""
        return isinstance(self.entries.get(key), TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.entries[key].size)

    def places(self, key: str) -> Iterator[tuple[torch.Size | None, _StorageInfo]]:
        """Yields the places of an entry's parts, with their offsets in the tensor; None for an
        entry that is not a tensor."""
        entry = self.entries[key]
        offsets: list[torch.Size | None] = [None]
        if isinstance(entry, TensorStorageMetadata):
            offsets = [chunk.offsets for chunk in entry.chunks]
        for offset in offsets:
            yield offset, self.metadata.storage_data[MetadataIndex(key, offset)]

    def bytes(self, key: str) -> int:
        """Size of an entry in the files, in bytes."""
        return sum(info.length for _, info in self.places(key))


class DcpTensor:
    """A tensor of a folder that is read by rows. Rows are numbered over all of its parts.

    Args:
        folder: the folder.
        key: name of the tensor in the folder.
    """

    def __init__(self, folder: DcpFolder, key: str) -> None:
        entry = folder.entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        self.key, self.shape, self.dtype = key, tuple(entry.size), entry.properties.dtype
        infos = dict(folder.places(key))
        self._chunks = [
            _Chunk(folder.path, key, chunk, infos[chunk.offsets], self.dtype)
            for chunk in entry.chunks
        ]

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape[1:]).numel()

    def rows(self, first: int, n: int) -> Tensor:
        """The rows from ``first`` up to ``first + n``, exclusive.

        Raises:
            ValueError: a file is damaged.
        """
        found = torch.empty((n, *self.shape[1:]), dtype=self.dtype)
        for chunk in self._chunks:
            begin = max(first, chunk.offsets[0])
            end = min(first + n, chunk.offsets[0] + chunk.sizes[0])
            if begin < end:
                part = chunk.rows(begin - chunk.offsets[0], end - begin)
                columns = [
                    slice(offset, offset + size)
                    for offset, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                ]
                found[(slice(begin - first, end - first), *columns)] = part
        return found

    def all(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0])


class _Chunk:
    """A part of a tensor: the output of :func:`torch.save` within a file."""

    def __init__(
        self,
        folder: Path,
        key: str,
        chunk: ChunkStorageMetadata,
        info: _StorageInfo,
        dtype: torch.dtype,
    ) -> None:
        self.offsets, self.sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        self._path, self._info, self._dtype = folder / info.relative_path, info, dtype
        self._what = f"{self._path} is refused for its entry {key!r}"

    def _slice(self, file: BinaryIO) -> FileSlice:
        return FileSlice(file, self._info.offset, self._info.length)

    @functools.cached_property
    def _values_at(self) -> int | None:
        """Offset of the values in the file; None if they are not contiguous there."""
        try:
            with open(self._path, "rb") as file:
                data = self._slice(file)
                with FakeTensorMode():
                    tensor = torch.load(data, map_location="cpu", weights_only=True)
                if not isinstance(tensor, Tensor) or tensor.dtype != self._dtype:
                    raise ValueError(f"{self._what}: it is not a tensor of {self._dtype}.")
                if tuple(tensor.size()) != self.sizes:
                    raise ValueError(
                        f"{self._what}: it has shape {tuple(tensor.size())}, but the metadata "
                        f"names {self.sizes}."
                    )
                if not tensor.is_contiguous():
                    return None
                begin = _stored_at(data)
                if begin is None:
                    return None
                skipped = tensor.storage_offset() * self._dtype.itemsize
                return self._info.offset + begin + skipped
        except OSError as error:
            raise ValueError(f"{self._path} can't be read: {error.strerror}.") from None
        except UNREADABLE as error:
            if self._what in str(error):
                raise
            with open(self._path, "rb") as file:
                raise refusal(self._what, self._slice(file), error) from None

    def rows(self, first: int, n: int) -> Tensor:
        """Rows of the chunk; ``first`` counts from the chunk's first row."""
        width = torch.Size(self.sizes[1:]).numel()
        if self._values_at is None:
            with open(self._path, "rb") as file:
                data = io.BytesIO(self._slice(file).read(-1))
            return torch.load(data, map_location="cpu", weights_only=True)[first : first + n]
        size = n * width * self._dtype.itemsize
        end = self._info.offset + self._info.length
        at = self._values_at + first * width * self._dtype.itemsize
        if at + size > end:
            raise ValueError(f"{self._what}: it is shorter than its shape {self.sizes} says.")
        memory = torch.empty(size, dtype=torch.uint8)
        with open(self._path, "rb", buffering=0) as file:
            file.seek(at)
            view, got = memoryview(memory.numpy()), 0
            while got < size and (more := file.readinto(view[got:])):
                got += more
        if got < size:
            raise ValueError(f"{self._path} is cut short: it ends at byte {at + got}.")
        return memory.view(self._dtype).view(n, *self.sizes[1:])


def _stored_at(data: io.RawIOBase) -> int | None:
    """Offset of the values in a file that :func:`torch.save` wrote for one tensor; None if they are
    compressed or not little-endian."""
    with zipfile.ZipFile(data) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        stored = [info for name, info in infos.items() if name.startswith("data/")]
        if len(stored) != 1 or stored[0].compress_type != zipfile.ZIP_STORED:
            return None
        if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
            return None
    # The header before the values may be longer than the archive's directory says.
    data.seek(stored[0].header_offset)
    header = data.read(_ZIP_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return stored[0].header_offset + _ZIP_HEADER + lengths


class DcpWriter:
    """Writes a folder that :mod:`torch.distributed.checkpoint` loads, tensor by tensor.

    Args:
        folder: the folder to write to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = open(folder / _DATA_FILE, "xb")  # noqa: SIM115
        self._entries: dict[str, StorageEntry] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def copy(self, source: DcpFolder, key: str, name: str) -> None:
        """Copies an entry of a folder under another name."""
        for offset, info in source.places(key):
            begin = self._file.tell()
            _copy_bytes(source.path / info.relative_path, info, self._file)
            self._store(MetadataIndex(name, offset), begin)
        self._entries[name] = source.entries[key]

    def add(self, name: str, first: int, part: Tensor, shape: tuple[int, ...]) -> None:
        """Writes rows of a tensor.

        Args:
            name: name of the tensor.
            first: number of the first row.
            part: the rows, with all columns. Parts of a tensor must come in order.
            shape: shape of the whole tensor.
        """
        entry = self._entries.setdefault(
            name,
            TensorStorageMetadata(TensorProperties(dtype=part.dtype), torch.Size(shape), []),
        )
        assert isinstance(entry, TensorStorageMetadata)
        offset = torch.Size([first, *[0] * (len(shape) - 1)])
        entry.chunks.append(ChunkStorageMetadata(offset, part.size()))
        begin = self._file.tell()
        data = io.BytesIO()
        torch.save(part.contiguous().clone(), data)
        self._file.write(data.getbuffer())
        self._store(MetadataIndex(name, offset), begin)

    def _store(self, index: MetadataIndex, begin: int) -> None:
        self._stored[index] = _StorageInfo(_DATA_FILE, begin, self._file.tell() - begin)

    def finish(self) -> None:
        """Writes the metadata and syncs all files."""
        keys: Mapping[str, Any] = {key: (key,) for key in self._entries}
        metadata = Metadata(self._entries, planner_data=dict(keys), storage_data=self._stored)
        self._file.flush()
        os.fsync(self._file.fileno())
        with open(self._folder / DCP_METADATA, "xb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)


def _copy_bytes(path: Path, info: _StorageInfo, into: BinaryIO) -> None:
    remaining = info.length
    try:
        with open(path, "rb") as file:
            file.seek(info.offset)
            while remaining:
                piece = file.read(min(remaining, _PIECE))
                if not piece:
                    raise ValueError(f"{path} is cut short: {remaining} bytes are missing.")
                into.write(piece)
                remaining -= len(piece)
                advance(len(piece))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
