"""Successive steps of a table."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Steps:
    """Successive steps of a table.

    Attributes:
        first: number of the first step.
        ids: int64 ``[n]``, ids of all steps.
        groups: int64 ``[n]``, groups of the ids (:func:`groups_of`), or None if all ids are
            replayed.
        ends: int64, end of each step in ``ids``.
        part: int64, all ids of the part of the log in which the steps end.
        unsampled: the same steps with all ids of the log, or None if they are not kept.
    """

    first: int
    ids: Tensor
    groups: Tensor | None
    ends: Tensor
    part: Tensor
    unsampled: Steps | None = None
