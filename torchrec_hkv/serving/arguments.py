"""Checks the arguments of an export before anything is written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_hkv.checkpoint.chain import Chain
from torchrec_hkv.serving.manifest import MANIFEST
from torchrec_hkv.serving.model_tables import ModelTable
from torchrec_hkv.serving.row_formats import RowFormat, check_row_format
from torchrec_hkv.serving.sources import SavedModel, Source, TrainedModel
from torchrec_hkv.serving.tracing import describe_inputs
from torchrec_hkv.table_names import find_name

#: A row format for all tables, or row formats by table.
Rows = RowFormat | Mapping[str, RowFormat]
#: The row of unknown ids: ``"initial"``, ``"zero"`` or numbers.
Unknown = str | Sequence[float] | Tensor

_TRAINED_AS: dict[torch.dtype, RowFormat] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Arguments of an export, unchecked.

    Attributes:
        model: the model.
        folder: the folder to write.
        rows: row formats of tables.
        inputs: positional arguments of the model's forward.
        kwargs: keyword arguments of the model's forward.
        unknown: rows of unknown ids.
        checkpoint: folder of a checkpoint to read from, or None to read from the model.
        deltas: folder of a chain that has just been written, or None.
        memory_bytes: memory for ids and rows of a table, in bytes.
        package: whether to compile a package for C++.
        lookup_counts: whether to write how often rows were looked up.
    """

    model: nn.Module
    folder: Path
    rows: Rows | None
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    unknown: Unknown | Mapping[str, Unknown]
    checkpoint: str | os.PathLike[str] | None
    deltas: str | os.PathLike[str] | None
    memory_bytes: int
    package: bool
    lookup_counts: bool


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """The checked choices of an export, by full name of a table.

    Attributes:
        source: source of rows, cores and dense tensors.
        rows: row formats of the tables that are written as rows. Other tables are written as cores.
        unknown: ``"initial"``, ``"zero"`` or a row.
        memory_bytes: memory for ids and rows of a table, in bytes.
    """

    source: Source
    rows: dict[str, RowFormat]
    unknown: dict[str, str | list[float]]
    memory_bytes: int

    @classmethod
    def of(cls, arguments: ExportArguments, tables: Sequence[ModelTable]) -> ExportSettings:
        """Checks arguments.

        Raises:
            TypeError: ``inputs`` contain a value that can't be exported.
            ValueError: an argument is invalid.
        """
        if not tables:
            raise ValueError(
                "the model has no EmbeddingBagCollection and no EmbeddingCollection: use "
                "torch.export instead."
            )
        if arguments.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {arguments.memory_bytes}, but must be at least 1.")
        target = arguments.folder
        if (target.exists() or target.is_symlink()) and not (target / MANIFEST).is_file():
            raise ValueError(
                f"{target} is not an exported model, and would be replaced: name a folder that "
                "doesn't exist."
            )
        _check_inputs(arguments.inputs, arguments.kwargs)
        source = _source(arguments, tables)
        names = [table.name for table in tables]
        of_rows, of_unknown = _by_table(arguments.rows, names), _by_table(arguments.unknown, names)
        rows: dict[str, RowFormat] = {}
        unknown: dict[str, str | list[float]] = {}
        for table in tables:
            is_named = isinstance(arguments.rows, Mapping) and table.name in of_rows
            if source.backend(table) != "tt" or is_named:
                trained_format = _TRAINED_AS.get(source.dtype(table), "fp32")
                what = f"rows of table {table.name!r}"
                rows[table.name] = check_row_format(of_rows.get(table.name, trained_format), what)
            elif source.has_cache(table):
                raise ValueError(
                    f"table {table.name!r} has a cache, and its cores lack the rows in it: export "
                    f"it as rows, for example rows={{{table.config.name!r}: 'fp32'}}."
                )
            unknown[table.name] = _checked_unknown(table, of_unknown.get(table.name, "initial"))
        return cls(source, rows, unknown, arguments.memory_bytes)

    def has_cores(self, table: ModelTable) -> bool:
        """Whether a table is written as cores."""
        return table.name not in self.rows


def _source(arguments: ExportArguments, tables: Sequence[ModelTable]) -> Source:
    if arguments.checkpoint is not None:
        if arguments.deltas is not None:
            raise ValueError(
                "deltas and checkpoint are both given, but a checkpoint knows its own chain: leave "
                "deltas out."
            )
        return SavedModel(arguments.checkpoint, tables)
    if arguments.deltas is None:
        return TrainedModel(arguments.model, None)
    newest = Chain(Path(arguments.deltas)).newest()
    if newest is None:
        raise ValueError(
            f"deltas is {os.fspath(arguments.deltas)!r}, which has no checkpoint of a DeltaWriter: "
            "write one first."
        )
    return TrainedModel(arguments.model, newest.digest)


def _by_table(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    return {find_name(name, names): setting for name, setting in value.items()}


def _checked_unknown(table: ModelTable, value: Any) -> str | list[float]:
    if isinstance(value, str) and value in ("initial", "zero"):
        return value
    if isinstance(value, Tensor) or (isinstance(value, Sequence) and not isinstance(value, str)):
        row = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
        if tuple(row.shape) == (table.dim,) and bool(row.isfinite().all()):
            return row.tolist()
    raise ValueError(
        f"unknown is {value!r} for table {table.name!r}, but must be 'initial', 'zero' or a row of "
        f"{table.dim} finite numbers."
    )


def _check_inputs(inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        raise ValueError(
            f"inputs is a {type(inputs).__name__}, but must be a tuple of the positional arguments "
            "of the model's forward."
        )
    _, records, tensors = describe_inputs(tuple(inputs), dict(kwargs or {}))
    remaining = list(tensors)
    for record in records:
        if record.kind == "ids":
            values, lengths = remaining.pop(0), remaining.pop(0)
            del remaining[: record.is_weighted]
            if values.numel() < 2 or lengths.shape[1] < 2:
                raise ValueError(
                    f"inputs hold {values.numel()} ids of {lengths.shape[1]} samples, but must "
                    "hold at least 2 ids of 2 samples: the export takes smaller sizes as fixed."
                )
        elif record.kind == "tensor":
            remaining.pop(0)
