"""Entries of a table, as its calls give them back."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Evicted:
    """The first ``count`` entries are what an insertion threw out, refused or did not admit.

    Attributes:
        ids: int64 ``[n]``.
        rows: ``[n, dim]``.
        scores: int64 ``[n]``; under the epoch policies the bits of an unsigned number.
        count: int64 ``[1]``, at most ``n``. Entries from there on are undefined.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor
    count: Tensor


@dataclasses.dataclass(frozen=True)
class Entries:
    """Ids with all that a table keeps of them.

    Attributes:
        ids: int64 ``[n]``.
        rows: ``[n, dim]``.
        scores: int64 ``[n]``; under the epoch policies the bits of an unsigned number.
        states: float32 ``[n, state_dim]``.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor
    states: Tensor


@dataclasses.dataclass(frozen=True)
class GroupEvicted(Evicted):
    """The same of the tables of a group; rows are as wide as those of the widest table.

    Attributes:
        tables: int32 ``[n]``: the index of each entry's table.
    """

    tables: Tensor


@dataclasses.dataclass(frozen=True)
class GroupEntries(Entries):
    """The same of the tables of a group; rows and states are as wide as the widest table's.

    Attributes:
        tables: int32 ``[n]``: the index of each entry's table.
    """

    tables: Tensor
