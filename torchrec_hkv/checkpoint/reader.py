"""Reads files of :mod:`torch.distributed.checkpoint` without running code that they name."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

_NO_CODE = (
    "nothing that it names was run; if you trust where it comes from, name the class to "
    "torch.serialization.add_safe_globals"
)
#: What torch.load raises for files that torch.save did not write.
UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_value(data: io.BytesIO, what: str, kind: type | None = None) -> Any:
    """Loads a value that torch.save wrote, if torch.load considers its classes safe.

    Args:
        data: the bytes that torch.save wrote.
        what: the beginning of error messages.
        kind: the type that the value must have; None for any.

    Raises:
        ValueError: the value can't be read, names other classes, or has another type.
    """
    data.seek(0)
    try:
        value = torch.load(data, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise refusal(what, data, error) from None
    numbers = (int, float)
    is_same = kind is None or type(value) is kind or (type(value) in numbers and kind in numbers)
    if not is_same:
        raise ValueError(
            f"{what}: it is of type {type(value).__name__}, but must be of {kind.__name__}."
        )
    return value


def refusal(what: str, data: io.IOBase, error: Exception) -> ValueError:
    """The error for a value that torch.load refused. It names unsafe classes if there are any,
    otherwise it has the first line of torch.load's error."""
    named = _unsafe(data)
    if named:
        return ValueError(f"{what}: it names {', '.join(named)}; {_NO_CODE}.")
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(f"{what}: it can't be read ({first})")


def _unsafe(data: io.IOBase) -> list[str]:
    """Names in the data that torch.load(weights_only=True) refuses."""
    data.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except UNREADABLE:
        return []


class FileSlice(io.RawIOBase):
    """A part of an open file, as a file. The part must lie within the file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"there is no byte {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view)
        self._at += read
        return read


class CheckedReader(FileSystemReader):
    """Reads tensors according to checked metadata.

    Args:
        path: the folder of the tensors.
        metadata: the result of :func:`torchrec_hkv.checkpoint.metadata.read_metadata`.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def check_tensors(self, keys: Iterable[str]) -> None:
        """Checks that entries are the tensors that the metadata describes, without reading values.

        Raises:
            ValueError: an entry differs; the message names the file and the entry.
        """
        for key in keys:
            entry = self._metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                for chunk in entry.chunks:
                    self._check_tensor(key, chunk.offsets, chunk.sizes, entry.properties.dtype)

    def _check_tensor(
        self, key: str, offsets: torch.Size, sizes: torch.Size, dtype: torch.dtype
    ) -> None:
        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        path = Path(self.path) / info.relative_path
        what = f"{path} is refused for its entry {key!r}"
        with open(path, "rb") as file:
            data = FileSlice(file, info.offset, info.length)
            try:
                with FakeTensorMode():
                    tensor = torch.load(data, map_location="cpu", weights_only=True)
                stored = _stored_bytes(data)
            except UNREADABLE as error:
                raise refusal(what, data, error) from None
        _check(what, tensor, sizes, dtype)
        if stored != tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{what}: it has {stored} bytes of values instead of "
                f"{tensor.untyped_storage().nbytes()}."
            )

    def read_tensor(self, key: str) -> torch.Tensor:
        """Reads a tensor to host memory, and checks it as :meth:`check_tensors` does.

        It takes a fraction of the time of ``torch.distributed.checkpoint.load``, which matters if
        many small tensors are read often.

        Raises:
            ValueError: as :meth:`check_tensors`.
        """
        entry = self._metadata.state_dict_metadata[key]
        parts = [
            self._read_part(key, chunk.offsets, chunk.sizes, entry.properties.dtype)
            for chunk in entry.chunks
        ]
        if len(parts) == 1 and entry.chunks[0].sizes == entry.size:
            return parts[0]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk, part in zip(entry.chunks, parts, strict=True):
            place = tuple(
                slice(begin, begin + size)
                for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            tensor[place] = part
        return tensor

    def _read_part(
        self, key: str, offsets: torch.Size, sizes: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        path = Path(self.path) / info.relative_path
        what = f"{path} is refused for its entry {key!r}"
        with open(path, "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        try:
            # Checked before memory is allocated: the file holds as many bytes as the tensor needs.
            stored = _stored_bytes(data)
            needed = sizes.numel() * dtype.itemsize
            if stored != needed:
                raise ValueError(f"{what}: it has {stored} bytes of values instead of {needed}.")
            data.seek(0)
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            if isinstance(error, ValueError) and str(error).startswith(what):
                raise
            raise refusal(what, data, error) from None
        _check(what, tensor, sizes, dtype)
        return tensor.contiguous()

    def check_value(self, key: str, value: object) -> None:
        """Checks the type of an entry that is not a tensor.

        Args:
            key: key of the entry.
            value: the value that the entry will replace; it has the needed type.

        Raises:
            ValueError: the type differs; the message names the file and the entry.
        """
        info = self._metadata.storage_data[MetadataIndex(key)]
        path = Path(self.path) / info.relative_path
        with open(path, "rb") as file:
            data = io.BytesIO(FileSlice(file, info.offset, info.length).read(-1))
        load_value(data, f"{path} is refused for its entry {key!r}", type(value))


class CheckedPlanner(DefaultLoadPlanner):
    """Loads values other than tensors with :func:`load_value`; torch's own planner unpickles
    them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = load_value(value, f"the entry {read_item.storage_index.fqn!r} is refused")
        clean = io.BytesIO()
        torch.save(loaded, clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)


def _check(what: str, tensor: object, sizes: torch.Size, dtype: torch.dtype) -> None:
    """Checks that the value of an entry is a tensor with the right dtype and shape."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what}: it is a {type(tensor).__name__} in place of a tensor.")
    if tensor.dtype != dtype or tensor.size() != sizes:
        raise ValueError(
            f"{what}: it is of dtype {tensor.dtype} and shape {tuple(tensor.size())}, but the "
            f"metadata names {dtype} and {tuple(sizes)}."
        )


def _stored_bytes(data: io.IOBase) -> int:
    """Number of bytes of values in a file that torch.save wrote."""
    with zipfile.ZipFile(data) as archive:
        parts = (info.filename.split("/") for info in archive.infolist())
        sizes = (info.file_size for info in archive.infolist())
        return sum(n for part, n in zip(parts, sizes, strict=True) if part[1:-1] == ["data"])
