"""Sets of read-only tables that are looked up together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.serving import ops
from torchrec_hkv.serving.row_formats import ROW_FORMATS, RowFormat
from torchrec_hkv.tensor_train import TTGroup

__all__ = ["ReadOnlyTable", "ReadOnlyTables", "ops"]

_ops = torch.ops.torchrec_hkv
_ZERO = {"distribution": "uniform", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}


@dataclasses.dataclass(frozen=True, eq=False)
class RowChanges:
    """Changes of a table since its file was written.

    Attributes:
        ids: int64 ``[n]``, distinct.
        data: uint8 ``[n, row_bytes]``.
        is_erased: bool ``[n]``.
    """

    ids: Tensor
    data: Tensor
    is_erased: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ServingHotRows:
    """Rows in HBM of a table whose rows are in host memory; ``csrc/serving/hot_rows.h`` describes
    them.

    Attributes:
        words: which rows are hot, int32 ``[rows / 32 rounded up, 2]``.
        rows: the hot rows, uint8 ``[n, row_bytes]``.
        counts: number of sampled lookups of each row, int32 ``[rows]``; lookups add to it. None:
            not counted.
        host_lookups: number of lookups that read a row in host memory, int64 ``[1]``; lookups add
            to it. None: not counted.
    """

    words: Tensor
    rows: Tensor
    counts: Tensor | None = None
    host_lookups: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ReadOnlyTable:
    """One table.

    Attributes:
        name: name of the table.
        dim: columns of a row.
        row_format: format of the rows.
        index: int64 ``[blocks, buckets, 8]``, as :meth:`TableFile.map` or :func:`build_layer`
            returns it.
        rows: uint8 ``[entries, row_bytes]``, as the same functions return them.
        unit: unit of quantised rows.
        seed: seed of initial rows, mixed with the table's name (:func:`table_seed`).
        initial: distribution of the rows of unknown ids, as
            :func:`torchrec_hkv.hash_table.initializers.op_arguments` returns it.
        default_row: the row of all unknown ids, float32 ``[dim]``, which replaces ``initial``; or
            None.
        changed_index, changed_rows: index and rows of ids that have changed or are erased, or None.
            They take precedence over ``index`` and ``rows``.
        changes: the changes from which these two were built. The next version adds to them;
            lookups don't read them.
        hot: the rows that are in HBM, if ``rows`` are in pinned host memory; else None.
    """

    name: str
    dim: int
    row_format: RowFormat
    index: Tensor
    rows: Tensor
    unit: float = 1.0
    seed: int = 0
    initial: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(_ZERO))
    default_row: Tensor | None = None
    changed_index: Tensor | None = None
    changed_rows: Tensor | None = None
    changes: RowChanges | None = None
    hot: ServingHotRows | None = None


class ReadOnlyTables:
    """Tables that are looked up together. They are immutable.

    Args:
        tables: the tables, in the order of their numbers in lookups.
        counters: int64 ``[tables, 2]``, to which lookups add the number of ids and of unknown ids.
            Zeros by default.
        tensor_train: groups of Tensor-Train tables, each with its cores.

    Raises:
        ValueError: a tensor differs from the description of :class:`ReadOnlyTable`.
    """

    def __init__(
        self,
        tables: Sequence[ReadOnlyTable],
        counters: Tensor | None = None,
        tensor_train: Sequence[tuple[TTGroup, Sequence[Tensor]]] = (),
    ) -> None:
        self.tables = tuple(tables)
        self.names = {table.name: number for number, table in enumerate(self.tables)}
        if counters is None:
            counters = torch.zeros(len(self.tables), 2, dtype=torch.int64)
        #: The argument ``counters``, or zeros.
        self.counters = counters
        no_ids, no_rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        no_row, no_words = torch.empty(0), torch.empty(0, dtype=torch.int32)
        all_cold = ServingHotRows(no_words, no_rows)
        hot = [all_cold if table.hot is None else table.hot for table in tables]
        self._number = _ops.serving_open(
            [table.index for table in tables],
            [table.rows for table in tables],
            [no_ids if table.changed_index is None else table.changed_index for table in tables],
            [no_rows if table.changed_rows is None else table.changed_rows for table in tables],
            [hot_rows.words for hot_rows in hot],
            [hot_rows.rows for hot_rows in hot],
            [no_words if hot_rows.counts is None else hot_rows.counts for hot_rows in hot],
            [
                no_ids if hot_rows.host_lookups is None else hot_rows.host_lookups
                for hot_rows in hot
            ],
            [no_row if table.default_row is None else table.default_row for table in tables],
            [table.dim for table in tables],
            [ROW_FORMATS.index(table.row_format) for table in tables],
            [table.unit for table in tables],
            [table.seed for table in tables],
            [table.initial["distribution"] for table in tables],
            [table.initial[key] for table in tables for key in ("low", "high", "mean", "std")],
            counters,
            [group.handle for group, _ in tensor_train],
            [len(cores) for _, cores in tensor_train],
            [core for _, cores in tensor_train for core in cores],
        )
        self._groups = [group for group, _ in tensor_train]
        #: The handle of these tables in ops, int64 ``[1]``.
        self.handle = torch.tensor([self._number])

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            # Python may free tables while torch.export traces a program. The trace would record an
            # op instead of running it, so this calls no op.
            _C.serving_close(self._number)

    def pool(
        self,
        tables: Sequence[int],
        ids: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        *,
        features: Sequence[int] | None = None,
        mean: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Looks up and pools the rows of some features, each in one of the tables.

        Args:
            tables: the number of the table of each output.
            ids: int64 ``[n]``, ordered by feature, then by sample.
            lengths: int32 or int64 ``[features, samples]``, the number of ids in each bag.
            weights: float32 ``[n]``. None: all weights are 1.
            features: the number of the feature of each output. None: output ``i`` is of feature
                ``i``.
            mean: whether to divide a sum by the number of ids in its bag.
            dtype: dtype of the result: float32, float16 or bfloat16.

        Returns:
            ``[samples, columns of all outputs]``. An empty bag gives zeros.

        Raises:
            TypeError: a tensor has the wrong dtype.
            ValueError: a shape, a table number or a device is wrong.
        """
        features = range(len(tables)) if features is None else features
        kind = ops.SCALED_ROWS if mean else ops.SUM
        columns = sum(self._table(table).dim for table in tables)
        return _C.serving_pool(
            self.handle, ids, lengths, weights, list(features), list(tables),
            [kind] * len(tables), columns, dtype,
        )  # fmt: skip

    def rows(self, table: int, ids: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Looks up rows of one table.

        Args:
            table: number of the table.
            ids: int64 ``[n]``.
            dtype: dtype of the result: float32, float16 or bfloat16.

        Returns:
            ``[n, dim]``.

        Raises:
            TypeError: ids have the wrong dtype.
            ValueError: ids have the wrong shape or device, or there is no such table.
        """
        self._table(table)
        return _C.serving_table_rows(self.handle, ids, table, dtype)

    def _table(self, number: int) -> ReadOnlyTable:
        if not 0 <= number < len(self.tables):
            raise ValueError(f"table is {number}, but must be from 0 to {len(self.tables) - 1}.")
        return self.tables[number]
