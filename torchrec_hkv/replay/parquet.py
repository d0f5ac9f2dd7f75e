"""Logs in Parquet, read with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchrec_hkv import _C
from torchrec_hkv.replay.arrays import PART_SAMPLES, int64_tensor
from torchrec_hkv.replay.log import Ids, Log, LogError, Part, check_file

if TYPE_CHECKING:
    import pyarrow


class ParquetLog(Log):
    """A log of columns of integers or texts, or of lists of these.

    A null is a missing id. A list holds any number of ids of its sample. Texts are hashed to 64
    bits. A log can also be sorted by a column of dates or times.

    Args:
        path: path of the file.

    Raises:
        LogError: pyarrow is not installed, or the file is not Parquet.
    """

    def __init__(self, path: Path) -> None:
        check_file(path)
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise LogError(
                f"{path}: Parquet needs the package pyarrow, which can't be imported ({error}): "
                "pip install pyarrow."
            ) from None
        self.name, self._path = str(path), path
        try:
            schema = parquet.read_schema(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise LogError(f"{path} is not a Parquet file: {_line(error)}.") from None
        self.columns = tuple(field.name for field in schema if _is_ids(field.type))
        self._ordered = tuple(field.name for field in schema if _is_ordered(field.type))

    @property
    def ordered_columns(self) -> tuple[str, ...]:
        return self._ordered

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self._path) as file:
                for batch in file.iter_batches(PART_SAMPLES, columns=list(columns)):
                    ids = {column: _ids(batch.column(column)) for column in columns}
                    yield Part(batch.num_rows, ids)
        except (pyarrow.ArrowException, OSError) as error:
            raise LogError(f"{self._path} is damaged: {_line(error)}.") from None


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _is_ids(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    return types.is_integer(kind) or _is_text(kind)


def _is_ordered(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or (types.is_temporal(kind) and kind.bit_width <= 64)


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    checks = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(check(kind) for check in checks)


def _ids(column: pyarrow.Array) -> Ids:
    from pyarrow import compute, types

    samples = None
    if types.is_list(column.type) or types.is_large_list(column.type):
        samples = compute.list_parent_indices(column).to_numpy(zero_copy_only=False)
        column = compute.list_flatten(column)
    if column.null_count:
        valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        samples = valid if samples is None else samples[valid]
        column = column.drop_null()
    at = None if samples is None else torch.from_numpy(samples.astype(np.int64))
    return Ids(_values(column), at)


def _values(column: pyarrow.Array) -> torch.Tensor:
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        return _values(column.dictionary)[int64_tensor(column.indices.to_numpy())]
    if types.is_temporal(column.type):  # of 32 or 64 bits
        column = column.view(f"int{column.type.bit_width}")
    if not _is_text(column.type):
        return int64_tensor(column.to_numpy())
    offset_type = np.int64 if "large" in str(column.type) else np.int32
    _, offsets, data = column.buffers()
    if data is None or len(column) == 0:
        return _C.hash_texts(
            torch.empty(0, dtype=torch.uint8), torch.zeros(len(column) + 1, dtype=torch.int64)
        )
    bounds = np.frombuffer(offsets, dtype=offset_type)[column.offset :][: len(column) + 1]
    text = np.frombuffer(pyarrow.py_buffer(data), dtype=np.uint8).copy()
    return _C.hash_texts(torch.from_numpy(text), torch.from_numpy(bounds.astype(np.int64)))
