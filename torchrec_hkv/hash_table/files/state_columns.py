"""Converts rows and states between ranges of columns of a table."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchrec_hkv import _C

#: Added to the number of a layout if each row stores its number of updates.
OWN_STEPS = 256
_OF_COLUMNS = {
    _C.Optimizer.MOMENTUM: 1,
    _C.Optimizer.ADAGRAD: 1,
    _C.Optimizer.ROWWISE_ADAM: 1,
    _C.Optimizer.ADAM: 2,
    _C.Optimizer.LAMB: 2,
    _C.Optimizer.FTRL: 2,
}
_OF_ROWS = (_C.Optimizer.ROWWISE_ADAGRAD, _C.Optimizer.ROWWISE_ADAM)


@dataclasses.dataclass(frozen=True)
class StateColumns:
    """The layout of a row's states (``csrc/common/optimizers.h``): for each quantity a vector of
    all columns, then the values that a row has once, then padding.

    Attributes:
        of_columns: number of quantities with a value for each column.
        of_rows: number of values that a row has once.
    """

    of_columns: int
    of_rows: int

    @classmethod
    def of_layout(cls, layout: int) -> StateColumns:
        """Makes it from the layout number in saved states."""
        kind = _C.Optimizer(layout % OWN_STEPS)
        own_step = layout >= OWN_STEPS
        return cls(_OF_COLUMNS.get(kind, 0), (kind in _OF_ROWS) + own_step)


@dataclasses.dataclass(frozen=True)
class ColumnRange:
    """Columns ``begin`` to ``end`` of a table."""

    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin

    def intersection(self, other: ColumnRange) -> ColumnRange:
        """The common columns; if there are none, ``width`` is not positive."""
        return ColumnRange(max(self.begin, other.begin), min(self.end, other.end))


def copy_columns(
    rows: Tensor,
    states: Tensor,
    columns: ColumnRange,
    into_rows: Tensor,
    into_states: Tensor,
    into: ColumnRange,
    parts: StateColumns,
    *,
    filled: int,
) -> None:
    """Copies the common columns of two ranges, and merges the values that rows have once.

    For every optimizer such a value is a mean over columns. The merged value is the mean of the
    ranges' values, weighted by their numbers of columns. Equal values stay bit-identical.

    Args:
        rows: ``[n, columns.width]``.
        states: float32 ``[n, ...]`` of these rows.
        columns: columns of ``rows``.
        into_rows: ``[n, into.width]``; written in place.
        into_states: float32 ``[n, ...]`` of these rows; written in place.
        into: columns of ``into_rows``.
        parts: layout of the states.
        filled: number of columns of ``into`` that were copied before.
    """
    both = columns.intersection(into)
    width = both.width
    source, target = both.begin - columns.begin, both.begin - into.begin
    into_rows[:, target : target + width] = rows[:, source : source + width]
    for k in range(parts.of_columns):
        at, to = k * columns.width + source, k * into.width + target
        into_states[:, to : to + width] = states[:, at : at + width]
    for k in range(parts.of_rows):
        value = states[:, parts.of_columns * columns.width + k]
        place = into_states[:, parts.of_columns * into.width + k]
        if filled == 0:
            place.copy_(value)
        else:
            place += (value - place) * (width / (filled + width))
