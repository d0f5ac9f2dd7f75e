"""Logs of binary integers: ``.npy``, ``.npz``, and int64 without a header."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from torchrec_hkv.replay.log import Ids, Log, LogError, Part, check_file

#: Number of samples to read at a time.
PART_SAMPLES = 1 << 20


class ArrayLog(Log):
    """Integer arrays by name. Row ``i`` of all arrays is sample ``i``.

    Args:
        name: name of the file.
        arrays: integer arrays of one dimension, or of two dimensions, whose columns become columns
            ``name_0`` and so on. Other arrays are ignored.

    Raises:
        LogError: the arrays have different lengths.
    """

    def __init__(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.name = name
        self._columns: dict[str, np.ndarray] = {}
        for key, array in arrays.items():
            if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
                continue
            if array.ndim == 1:
                self._columns[key] = array
                continue
            prefix = f"{key}_" if key else ""
            for column in range(array.shape[1]):
                self._columns[f"{prefix}{column}"] = array[:, column]
        self.columns = tuple(self._columns)
        lengths = {key: len(array) for key, array in self._columns.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise LogError(f"{name}: its arrays must be of one length, but they have {sizes} rows.")
        if not lengths:
            raise LogError(
                f"{name} has no array of integers of one or two dimensions, but needs one with ids."
            )
        self._num_samples = next(iter(lengths.values()))

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        for begin in range(0, self._num_samples, PART_SAMPLES):
            end = min(begin + PART_SAMPLES, self._num_samples)
            ids = {
                column: Ids(int64_tensor(self._columns[column][begin:end])) for column in columns
            }
            yield Part(end - begin, ids)


def int64_tensor(values: np.ndarray) -> torch.Tensor:
    """Converts integers of any width to int64; uint64 keeps its bits. Copies only if needed."""
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        values = values.astype(np.uint64, copy=False).view(np.int64)
    values = np.ascontiguousarray(values, dtype=np.int64)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def read_npy(path: Path) -> Log:
    """An array of integers ``[samples]`` (column ``ids``) or ``[samples, columns]`` (``0``, ...).

    The file is mapped, not read as a whole.

    Raises:
        LogError: the file has another format.
    """
    check_file(path)
    try:
        array = np.load(path, mmap_mode="c")  # a tensor's memory must be writable
    except (ValueError, OSError, EOFError) as error:
        raise LogError(f"{path} is not a .npy file of numbers: {error}.") from None
    return ArrayLog(str(path), {"ids" if array.ndim == 1 else "": array})


def read_npz(path: Path) -> Log:
    """Arrays of integers by name, as ``numpy.savez`` writes them. They are read into memory.

    Raises:
        LogError: the file has another format.
    """
    check_file(path)
    try:
        with np.load(path) as file:
            return ArrayLog(str(path), {key: file[key] for key in file.files})
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise (
            error
            if isinstance(error, LogError)
            else LogError(f"{path} is not a .npz file of arrays: {error}.")
        ) from None


class RawLog(Log):
    """A sequence of int64 in the machine's byte order, as the column ``ids``.

    Args:
        name: name of the log in messages.
        path: path of the file. None: the standard input.
    """

    columns = ("ids",)

    def __init__(self, name: str, path: Path | None) -> None:
        if path is not None:
            check_file(path)
        self.name, self._path = name, path
        self.is_repeatable = path is not None

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        if self._path is None:
            yield from self._parts(sys.stdin.buffer)
            return
        with self._path.open("rb") as file:
            yield from self._parts(file)

    def _parts(self, file: BinaryIO) -> Iterator[Part]:
        while data := _read(file, 8 * PART_SAMPLES):
            if len(data) % 8:
                raise LogError(f"{self.name} ends within an id: its size is not a multiple of 8.")
            values = int64_tensor(np.frombuffer(data, dtype=np.int64))
            yield Part(values.numel(), {"ids": Ids(values)})


def _read(file: BinaryIO, size: int) -> bytes:
    """Reads this many bytes, or all that are left, because a pipe may return fewer at a time."""
    parts = []
    while size and (data := file.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
