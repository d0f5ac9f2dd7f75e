"""Sets of read-only tables that are looked up together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.row_formats import ROW_FORMATS, RowFormat
from torchrec_hkv.tensor_train import TTGroup

__all__ = ["ReadOnlyTable", "ReadOnlyTables", "ops"]

_ops = torch.ops.torchrec_hkv
# Resolved once: each call would look for the overload again.
_pool, _rows = _ops.serving_pool.default, _ops.serving_rows.default
_ZERO = {"distribution": "uniform", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """What deltas changed in a table since its file.

    Attributes:
        ids: int64 ``[n]``, ascending.
        data: uint8 ``[n, row_bytes]``.
        is_erased: bool ``[n]``.
    """

    ids: Tensor
    data: Tensor
    is_erased: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ReadOnlyTable:
    """One table.

    Attributes:
        name: its name.
        dim: columns of its rows.
        row_format: of its rows.
        index: int64 ``[blocks, buckets, 8]``, and
        rows: uint8 ``[entries, row_bytes]``, as :meth:`TableFile.map` or :func:`build_layer` give
            them.
        unit: of quantised rows.
        seed: of initial rows, mixed with the table's name (:func:`table_seed`).
        initial: what unknown ids get: arguments of the distribution, as
            :func:`torchrec_hkv.hash_table.initializers.op_arguments` gives them.
        default_row: or this row, float32 ``[dim]``; None: not.
        changed_index, changed_rows: of ids whose rows count instead of those above, or which are
            erased; None: there are none.
        changes: what these were built from, to build those of the next version; lookups don't need
            it.
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
    changes: Changes | None = None


class ReadOnlyTables:
    """Tables that are looked up together. Nothing of them changes while this object lives.

    Args:
        tables: in the order that lookups number them in.
        counters: int64 ``[tables, 2]``, which lookups add to: ids that were looked up, and those of
            them that were unknown. By default zeros.
        tensor_train: groups of Tensor-Train tables beside them, with the cores of each.

    Raises:
        ValueError: a tensor is not as :class:`ReadOnlyTable` says.
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
        #: As given.
        self.counters = counters
        no_ids, no_rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        no_row = torch.empty(0)
        self._number = _ops.serving_open(
            [table.index for table in tables],
            [table.rows for table in tables],
            [no_ids if table.changed_index is None else table.changed_index for table in tables],
            [no_rows if table.changed_rows is None else table.changed_rows for table in tables],
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
        #: What names these tables in ops, int64 ``[1]``.
        self.handle = torch.tensor([self._number])

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            _ops.serving_close(self._number)

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
        """Pooled rows of some features, each of one of the tables.

        Args:
            tables: the number of the table of each output.
            ids: int64 ``[n]``, those of the first feature first, of it sample by sample.
            lengths: int32 or int64 ``[features, samples]``: ids of each bag.
            weights: float32 ``[n]``; by default 1.
            features: the number of the feature of each output; by default output ``i`` is of
                feature ``i``.
            mean: divides a pooled sum by the number of ids of its bag.
            dtype: of the result: float32, float16 or bfloat16.

        Returns:
            ``[samples, columns of all outputs]``; zeros for empty bags.

        Raises:
            TypeError: a tensor has another dtype.
            ValueError: a shape, a number or a device is not as above.
        """
        features = range(len(tables)) if features is None else features
        kind = ops.SCALED_ROWS if mean else ops.SUM
        columns = sum(self._table(table).dim for table in tables)
        return _pool(
            self.handle, ids, lengths, weights, list(features), list(tables),
            [kind] * len(tables), columns, dtype,
        )  # fmt: skip

    def rows(self, table: int, ids: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of one table.

        Args:
            table: its number.
            ids: int64 ``[n]``.
            dtype: of the result: float32, float16 or bfloat16.

        Returns:
            ``[n, dim]``.

        Raises:
            TypeError: ids have another dtype.
            ValueError: ids have another shape or device, or there is no such table.
        """
        lengths = torch.full((1, 1), ids.numel(), device=ids.device)
        dims = [self._table(table).dim]
        return _rows(self.handle, ids, lengths, [0], [table], dims, dtype)[0]

    def _table(self, number: int) -> ReadOnlyTable:
        if not 0 <= number < len(self.tables):
            raise ValueError(f"table is {number}, but must be from 0 to {len(self.tables) - 1}.")
        return self.tables[number]
