"""Rows and states of some columns of a table, out of those of other columns."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchrec_hkv import _C

_OWN_STEPS = 256
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
    """What a row's states are (``csrc/common/optimizers.h``): the values of all columns, one
    quantity after the other, then what the row has once, then padding.

    Attributes:
        of_columns: quantities that each column has.
        of_rows: values that the row has once.
    """

    of_columns: int
    of_rows: int

    @classmethod
    def of_layout(cls, layout: int) -> StateColumns:
        """From the number that saved states carry."""
        kind = _C.Optimizer(layout % _OWN_STEPS)
        own_step = layout >= _OWN_STEPS
        return cls(_OF_COLUMNS.get(kind, 0), (kind in _OF_ROWS) + own_step)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns ``begin`` to ``end`` of a table."""

    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin

    def common(self, other: Columns) -> Columns:
        """Those that are in both; ``width`` is not positive where there are none."""
        return Columns(max(self.begin, other.begin), min(self.end, other.end))


def copy_columns(
    rows: Tensor,
    states: Tensor,
    columns: Columns,
    into_rows: Tensor,
    into_states: Tensor,
    into: Columns,
    parts: StateColumns,
    *,
    filled: int,
) -> None:
    """Copies what two ranges of columns have in common, and joins what rows have once.

    That is a mean over columns for every optimizer that has it: the mean of the ranges' values by
    their numbers of columns. Equal values stay as they are, to the bit.

    Args:
        rows: ``[n, columns.width]``.
        states: float32 ``[n, ...]`` of the same rows.
        columns: theirs.
        into_rows: ``[n, into.width]``, written.
        into_states: float32 ``[n, ...]`` of the same rows, written.
        into: theirs.
        parts: what the states are.
        filled: columns of ``into`` that were copied before.
    """
    both = columns.common(into)
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
