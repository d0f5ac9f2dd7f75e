"""Entries of tables, as calls return them."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Evicted:
    """Entries that an insertion evicted, refused or did not admit: the first ``count`` of these.

    Attributes:
        ids: int64 ``[n]``.
        rows: ``[n, dim]``.
        scores: int64 ``[n]``; under the epoch policies, the bits of an unsigned number.
        count: int64 ``[1]``, at most ``n``. Further entries are undefined.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor
    count: Tensor


@dataclasses.dataclass(frozen=True)
class Entries:
    """Entries with everything a table stores of them.

    Attributes:
        ids: int64 ``[n]``.
        rows: ``[n, dim]``.
        scores: int64 ``[n]``; under the epoch policies, the bits of an unsigned number.
        states: float32 ``[n, state_dim]``.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor
    states: Tensor


@dataclasses.dataclass(frozen=True)
class GroupEvicted(Evicted):
    """:class:`Evicted` for the tables of a group; rows have the dim of the widest table.

    Attributes:
        tables: int32 ``[n]``: the index of each entry's table.
    """

    tables: Tensor


@dataclasses.dataclass(frozen=True)
class GroupEntries(Entries):
    """:class:`Entries` for the tables of a group; rows and states have the widest table's width.

    Attributes:
        tables: int32 ``[n]``: the index of each entry's table.
    """

    tables: Tensor
