"""Exports ids and rows of a saved table to .npy, Parquet or safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from torchrec_hkv.checkpoint.saved_checkpoint import OpenedTable
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.shard_files import dequantised_fields
from torchrec_hkv.progress import advance, reported

#: Endings of the formats. ``.npy`` files are written to a folder.
FORMATS = (".npy", ".parquet", ".safetensors")
_TYPES = {
    torch.int64: ("<i8", "I64"),
    torch.int32: ("<u4", "U32"),
    torch.float32: ("<f4", "F32"),
    torch.float16: ("<f2", "F16"),
    torch.bfloat16: ("<u2", "BF16"),
}
#: Names of columns in exported files, by their names in a saved table.
NAMES = {
    "ids": "id",
    "rows": "row",
    "states": "state",
    "scores": "score",
    "last_steps": "last_step",
}

Write = Callable[[dict[str, Tensor]], None]


def export_files(
    table: OpenedTable,
    into: str | os.PathLike[str],
    batch_bytes: int,
    *,
    with_states: bool = False,
) -> dict[str, Any]:
    """Writes ids and rows of a table. A file appears when it is complete.

    Args:
        table: a table that has files of its own.
        into: ``NAME.parquet`` or ``NAME.safetensors``, which is replaced if it exists, or a folder
            for ``id.npy``, ``row.npy`` and so on.
        batch_bytes: memory limit in bytes. One more byte is used for each slot of a table that is
            saved in deltas.
        with_states: whether to write optimizer states, scores and last steps, too, if the table
            has them.

    Returns:
        ``table``, ``ids`` (their number), ``dim``, and ``files``, the names of the written files.

    Raises:
        ValueError: the ending is of no known format, pyarrow is needed and not installed, or states
            of a table in column shards were asked for.
        OSError: writing failed.
    """
    path = Path(into)
    kind = path.suffix or ".npy"
    if kind not in FORMATS or (kind == ".npy" and path.suffix):
        raise ValueError(
            f"{str(path)!r} has an unknown ending: name a file that ends with .parquet or "
            ".safetensors, or a folder, without an ending, for .npy files."
        )
    names = ["rows"]
    if with_states:
        names += ["states", "scores", "last_steps"]
        part = table.first_columns[0]
        if part.columns.end != table.dim and "states" in {field.name for field in part.fields}:
            raise ValueError(
                f"Table {table.name!r} was saved in several columns, whose optimizer states can't "
                "be joined: export it without them."
            )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"There is no folder {path.absolute().parent} to write to.")
    first = next(table.batches(names, min(batch_bytes, 1 << 20)), None)
    columns = _columns(table, first, names)
    writer = {".npy": _npy, ".parquet": _parquet, ".safetensors": _safetensors}[kind]
    total = table.entries * table.entry_bytes()
    written = 0
    with reported(f"Exporting {table.name}", total), writer(path, table.entries, columns) as write:
        for batch in table.batches(names, batch_bytes):
            if len(batch["ids"]):
                write({name: batch[name] for name in columns})
                written += len(batch["ids"])
                advance(len(batch["ids"]) * table.entry_bytes())
        if written != table.entries:
            raise ValueError(
                f"The files of table {table.name!r} are inconsistent: they hold {written} "
                f"entries instead of {table.entries}."
            )
    files = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
    return {"table": table.name, "ids": written, "dim": table.dim, "files": files}


def _columns(
    table: OpenedTable, first: dict[str, Tensor] | None, names: Sequence[str]
) -> dict[str, tuple[torch.dtype, int | None]]:
    """Dtypes and widths of the columns to write, by name."""
    fields = {f.name: f for f in dequantised_fields(table.first_columns[0].fields)}
    columns: dict[str, tuple[torch.dtype, int | None]] = {"ids": (torch.int64, None)}
    for name in names:
        if name in fields:
            width = table.dim if name == "rows" else fields[name].columns
            dtype = fields[name].dtype if first is None else first[name].dtype
            columns[name] = (dtype, width)
    return columns


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A temporary file that replaces the file at a path when everything is written."""
    unfinished = path.with_name(f".{path.name}.saving")
    unfinished.unlink(missing_ok=True)
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync_folder(path.absolute().parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _array(tensor: Tensor) -> numpy.ndarray:
    """A NumPy array with the bits of a tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view("<u2")
    found = tensor.numpy()
    return found.view("<u4") if tensor.dtype == torch.int32 else found


@contextlib.contextmanager
def _npy(
    path: Path, entries: int, columns: dict[str, tuple[torch.dtype, int | None]]
) -> Iterator[Write]:
    path.mkdir(exist_ok=True)
    others = sorted(p.name for p in path.iterdir() if p.name not in _npy_names())
    if others:
        raise ValueError(f"{path} holds {others[0]!r}: name a folder of its own for .npy files.")
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name, (dtype, width) in columns.items():
            file = stack.enter_context(_unfinished(path / f"{NAMES[name]}.npy"))
            # numpy has no bfloat16.
            kind = "<f4" if dtype == torch.bfloat16 else _TYPES[dtype][0]
            shape = (entries,) if width is None else (entries, width)
            with open(file, "wb") as header:
                numpy.lib.format.write_array_header_1_0(
                    header, {"descr": kind, "fortran_order": False, "shape": shape}
                )
            arrays[name] = stack.enter_context(open(file, "ab"))

        def write(batch: dict[str, Tensor]) -> None:
            for name, file in arrays.items():
                tensor = batch[name]
                if tensor.dtype == torch.bfloat16:
                    tensor = tensor.float()
                file.write(memoryview(_array(tensor.contiguous())).cast("B"))

        yield write
        for file in arrays.values():
            file.flush()


def _npy_names() -> set[str]:
    return {f"{name}.npy" for name in NAMES.values()}


@contextlib.contextmanager
def _safetensors(
    path: Path, entries: int, columns: dict[str, tuple[torch.dtype, int | None]]
) -> Iterator[Write]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    starts = {}
    # Wide types first, so that all values are aligned.
    by_size = sorted(columns.items(), key=lambda column: -column[1][0].itemsize)
    for name, (dtype, width) in by_size:
        size = entries * dtype.itemsize * (1 if width is None else width)
        header[NAMES[name]] = {
            "dtype": _TYPES[dtype][1],
            "shape": [entries] if width is None else [entries, width],
            "data_offsets": [at, at + size],
        }
        starts[name] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _unfinished(path) as unfinished, open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()

        def write(batch: dict[str, Tensor]) -> None:
            for name in columns:
                data = memoryview(_array(batch[name].contiguous())).cast("B")
                file.seek(begin + starts[name])
                file.write(data)
                starts[name] += len(data)

        yield write
        file.flush()


@contextlib.contextmanager
def _parquet(
    path: Path, entries: int, columns: dict[str, tuple[torch.dtype, int | None]]
) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ValueError(
            "pyarrow is not installed, which writes Parquet: pip install pyarrow, or export to "
            ".safetensors or .npy."
        ) from None

    def column(name: str, tensor: Tensor) -> Any:
        # Parquet has no bfloat16, and few readers know its half floats.
        if tensor.is_floating_point():
            tensor = tensor.float()
        values = pyarrow.array(_array(tensor.contiguous().flatten()))
        width = columns[name][1]
        return values if width is None else pyarrow.FixedSizeListArray.from_arrays(values, width)

    def made(batch: dict[str, Tensor]) -> Any:
        return pyarrow.table({NAMES[name]: column(name, batch[name]) for name in columns})

    empty = {
        name: torch.empty((0,) if width is None else (0, width), dtype=dtype)
        for name, (dtype, width) in columns.items()
    }
    schema = made(empty).schema
    with _unfinished(path) as unfinished, parquet.ParquetWriter(unfinished, schema) as writer:
        yield lambda batch: writer.write_table(made(batch))
