"""Reads files of ids and rows: .safetensors, Parquet, or .npy files in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from torchrec_hkv.backends.specs import OptimizerSpec
from torchrec_hkv.checkpoint.conversion.source import (
    Eviction,
    SourceTable,
    check_row_type,
    optimizer_of_width,
    split_states,
)

#: Names of entries' tensors, by the names of columns that ``torchrec-hkv export`` writes.
COLUMNS = {
    "id": "ids",
    "row": "weight",
    "state": "states",
    "score": "scores",
    "last_step": "last_steps",
}
_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
}
_MAX_HEADER = 100 << 20


class RowFile:
    """The columns of a file.

    Attributes:
        path: the file, or the folder.
        columns: dtype and width of each column, by its name. The width of a vector is None.
        entries: number of rows of each column.
    """

    path: Path
    columns: dict[str, tuple[torch.dtype, int | None]]
    entries: int

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        """Yields some columns, at most ``size`` rows at a time."""
        raise NotImplementedError


class _Mapped(RowFile):
    """Columns whose values are stored unencoded, so that files can be mapped into memory.

    Args:
        path: the file, or the folder.
        arrays: for each column its dtype, its shape, and a tensor of it, or of its bytes: uint8
            ``[entries, bytes of an entry]``, which may begin anywhere in a file.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...], Tensor]]
    ) -> None:
        self.path, self._arrays = path, arrays
        lengths = {name: shape[0] for name, (_, shape, _) in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{path} has columns of different lengths: {lengths}.")
        self.entries = next(iter(lengths.values()), 0)
        self.columns = {
            name: (dtype, None if len(shape) == 1 else shape[1])
            for name, (dtype, shape, _) in arrays.items()
        }

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        for first in range(0, self.entries, size):
            batch = {}
            for name in names:
                dtype, shape, values = self._arrays[name]
                part = values[first : first + size].clone()
                batch[name] = part.view(dtype).view(len(part), *shape[1:])
            yield batch


def _mapped(path: Path, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes of a tensor in a file, ``[entries, bytes]``. Pages are read when they are used."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if at + size > path.stat().st_size:
        raise ValueError(f"{path} is cut short: it has {path.stat().st_size} bytes of {at + size}.")
    if size == 0:
        return torch.empty((shape[0], 0), dtype=torch.uint8)
    data = numpy.memmap(path, dtype=numpy.uint8, mode="c", offset=at, shape=(size,))
    return torch.from_numpy(data).view(shape[0], -1)


def _safetensors(path: Path) -> RowFile:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, path.stat().st_size):
            raise ValueError(f"{path} is not a .safetensors file: its header has {length} bytes.")
        try:
            header = json.loads(file.read(length))
            shapes = {
                name: (_SAFETENSORS.get(t["dtype"]), tuple(t["shape"]), t["data_offsets"][0])
                for name, t in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a .safetensors file: its header is damaged."
            ) from error
    arrays = {}
    for name, (dtype, shape, begin) in shapes.items():
        if name in COLUMNS:
            _check_shape(path, name, dtype, shape)
            arrays[name] = (dtype, shape, _mapped(path, 8 + length + begin, dtype, shape))
    return _Mapped(path, arrays)


def _check_shape(path: Path, name: str, dtype: object, shape: tuple[int, ...]) -> None:
    dimensions = 2 if name in ("row", "state") else 1
    are_integers = all(type(n) is int and n >= 0 for n in shape)
    if dtype is None or len(shape) != dimensions or not are_integers:
        raise ValueError(
            f"{path}: column {name!r} has type {dtype} and shape {shape}, but must have "
            f"{dimensions} dimension{'s' if dimensions > 1 else ''} of numbers."
        )


def _npy(path: Path) -> RowFile:
    arrays = {}
    for name in COLUMNS:
        file = path / f"{name}.npy"
        if not file.is_file():
            continue
        try:
            array = numpy.load(file, mmap_mode="c", allow_pickle=False)
            tensor = torch.from_numpy(array)
        except (ValueError, TypeError, OSError, EOFError) as error:
            raise ValueError(f"{file} can't be read: {error}") from None
        _check_shape(file, name, tensor.dtype, tuple(tensor.shape))
        arrays[name] = (tensor.dtype, tuple(tensor.shape), tensor)
    return _Mapped(path, arrays)


class _Parquet(RowFile):
    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import parquet
        except ModuleNotFoundError:
            raise ValueError(
                "Parquet needs the package pyarrow, which is not installed: pip install pyarrow, "
                "or convert a .safetensors file or .npy files."
            ) from None
        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a Parquet file: {error}") from None
        self.entries = self._file.metadata.num_rows
        self.columns = {}
        names = [name for name in self._file.schema_arrow.names if name in COLUMNS]
        # If lists have no fixed length, only their values tell the width.
        first = next(self.batches(names, 1), None) if self.entries else {}
        for name, tensor in first.items():
            width = None if tensor.dim() == 1 else tensor.shape[1]
            _check_shape(path, name, tensor.dtype, tuple(tensor.shape))
            self.columns[name] = (tensor.dtype, width)

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, Tensor]]:
        for batch in self._file.iter_batches(min(size, 1 << 20), columns=list(names)):
            yield {name: self._tensor(name, batch.column(name)) for name in names}

    def _tensor(self, name: str, column: object) -> Tensor:
        n = len(column)
        if column.null_count:
            raise ValueError(f"{self.path}: column {name!r} has values that are null.")
        values = column.flatten() if hasattr(column, "flatten") else column
        is_list = COLUMNS[name] in ("weight", "states")
        values = values if is_list else column
        tensor = torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
        if not is_list:
            return tensor
        if n == 0 or tensor.numel() % n:
            raise ValueError(f"{self.path}: lists of column {name!r} have different lengths.")
        return tensor.view(n, -1)


def open_row_file(path: Path) -> RowFile | None:
    """Opens a file of ids and rows. Returns None if the path has none of the formats.

    Raises:
        ValueError: the file is damaged, or has no column ``id`` or ``row``.
    """
    if path.is_file() and path.suffix == ".safetensors":
        file: RowFile = _safetensors(path)
    elif path.is_file() and path.suffix == ".parquet":
        file = _Parquet(path)
    elif path.is_dir() and (path / "row.npy").is_file():
        file = _npy(path)
    else:
        return None
    missing = [name for name in ("id", "row") if name not in file.columns]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r}: 'id' and 'row' are needed; 'state', 'score' and "
            "'last_step' are optional."
        )
    return file


def row_table(
    file: RowFile,
    name: str,
    optimizer: str | None,
    eviction: Eviction | None,
    without: Sequence[str],
) -> SourceTable:
    """The table in a file of ids and rows.

    Args:
        file: the file.
        name: full name of the table.
        optimizer: name of the optimizer whose states the file has; None: found from their width.
        eviction: what scores are; None: counts of lookups.
        without: ``"states"`` leaves out optimizer states, ``"scores"`` scores and last steps.

    Raises:
        ValueError: a column has a wrong dtype or width.
    """
    dtype, dim = file.columns["row"]
    if dtype == torch.float64:
        raise ValueError(f"{file.path}: column 'row' has type {dtype}, but float32 is needed.")
    check_row_type(name, dtype)
    for column in ("id", "score", "last_step"):
        kind = file.columns.get(column, (torch.int64, None))[0]
        if kind.is_floating_point:
            raise ValueError(
                f"{file.path}: column {column!r} has type {kind}, but int64 is needed."
            )
    spec: OptimizerSpec | None = None if optimizer is None else OptimizerSpec(optimizer)
    left_out = {"state"} if "states" in without else set()
    left_out |= {"score", "last_step"} if "scores" in without else set()
    names = [column for column in file.columns if column not in left_out]
    if "state" in names:
        spec = optimizer_of_width(name, file.columns["state"][1], dim, optimizer)
    width = sum(dtype.itemsize * (n or 1) for dtype, n in file.columns.values())

    def read(batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        for batch in file.batches(names, max(1, batch_bytes // (3 * width))):
            entries = {COLUMNS[column]: tensor for column, tensor in batch.items()}
            states = entries.pop("states", None)
            if states is not None:
                entries |= split_states(states.float(), spec, dim)
            entries["ids"] = entries["ids"].long()
            if "scores" in entries:
                entries["scores"] = entries["scores"].view(torch.int64)
            if "last_steps" in entries:
                entries["last_steps"] = _steps(file.path, entries["last_steps"].long())
            yield entries

    has_scores = "score" in names
    return SourceTable(
        name,
        dim,
        dtype,
        file.entries,
        read,
        spec,
        eviction or ("lfu" if has_scores else "lru"),
        _last(file) if "last_step" in names else 0,
    )


def _steps(path: Path, steps: Tensor) -> Tensor:
    if len(steps) and not (int(steps.min()) >= 0 and int(steps.max()) < 1 << 32):
        raise ValueError(
            f"{path}: column 'last_step' has values from {int(steps.min())} to {int(steps.max())}, "
            "but they must be from 0 to 2^32 - 1."
        )
    return steps


def _last(file: RowFile) -> int:
    def steps(batch: dict[str, Tensor]) -> int:
        return int(batch["last_step"].long().max())

    return max(
        (steps(b) for b in file.batches(["last_step"], 1 << 20) if len(b["last_step"])), default=0
    )
