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
        scores: int64 ``[n]``; bits of an unsigned number.
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
        scores: int64 ``[n]``; bits of an unsigned number.
        states: float32 ``[n, state_dim]``.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor
    states: Tensor
