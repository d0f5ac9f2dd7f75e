"""Merges the scores of an id over replicas, by sums and maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import name_of, sums_scores
from torchrec_hkv.hash_table.table_spec import TableSpec

_LEAST = -(1 << 63)
_LOW = 0xFFFFFFFF


def merged_values(
    sums: Tensor, replicas: int, known: Tensor, initial: Callable[[Tensor], Tensor]
) -> Tensor:
    """Rows and states.

    Args:
        sums: float32 ``[n, columns + 2]``, overwritten: over the replicas that have the id, of its
            row and states; how many these are; how many say that they had it at the last sync.
        replicas: all of them.
        known: bool ``[n]``, whether some replica touched or lost the id and had it at the last
            sync.
        initial: gives the initial rows, float32 ``[m, dim]``, of places int64 ``[m]``.

    Returns:
        float32 ``[n, columns]``.
    """
    values, holders, olds = sums[:, :-2], sums[:, -2], sums[:, -1]
    is_new = ~(known | (olds > 0))
    lacking = (is_new & (holders < replicas)).nonzero().flatten()
    if lacking.numel():
        rows = initial(lacking)
        values[lacking, : rows.shape[1]] += (replicas - holders[lacking])[:, None] * rows
    return values.div_(torch.where(is_new, float(replicas), holders)[:, None])


class ScoreMerge:
    """Converts scores of a policy to numbers that replicas add up or take the maximum of.

    Args:
        spec: the table's.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._policy = name_of(spec.eviction)
        self.adds = sums_scores(spec.eviction)

    def lowest(self, n: int, device: torch.device) -> Tensor:
        """The numbers of ids that a replica does not have, int64 ``[n]``."""
        return torch.full((n,), _LEAST, dtype=torch.int64, device=device)

    def highest_of(self, scores: Tensor, before: Tensor, touched: Tensor) -> Tensor:
        """The numbers to take the maximum of, int64 ``[n]``.

        Args:
            scores: int64 ``[n]``, of ids that a replica has.
            before: int64 ``[n]``, at the last sync; 0 where it is not known.
            touched: bool ``[n]``, whether they were touched here.
        """
        if self.adds:
            before = torch.where(touched, before, scores)
        if self._policy == "epoch_lfu":
            # The epoch of now, and the count of the last sync.
            return _ordered(scores & ~_LOW | before & _LOW)
        if self.adds:
            return before
        if self._policy == "customized":
            return torch.where(touched, scores, _LEAST)
        return _ordered(scores)

    def added(self, scores: Tensor, before: Tensor, touched: Tensor) -> Tensor:
        """Lookups since the last sync, int64 ``[n]``."""
        if self._policy == "epoch_lfu":
            scores, before = scores & _LOW, before & _LOW
        # An id that came back since counts from its return.
        more = torch.where(scores >= before, scores - before, scores)
        return torch.where(touched, more, 0)

    def merged(self, highest: Tensor, added: Tensor | None) -> Tensor:
        """The scores, int64 ``[n]``."""
        if self._policy == "epoch_lfu":
            highest = _ordered(highest)
            count = (highest & _LOW) + added
            return highest & ~_LOW | count.clamp(max=_LOW)
        if self.adds:
            # The highest count is 2^63 - 1.
            room = torch.iinfo(torch.int64).max - highest
            return highest + torch.minimum(added, room)
        return highest if self._policy == "customized" else _ordered(highest)


def _ordered(bits: Tensor) -> Tensor:
    """Unsigned numbers as signed ones of the same order, and back."""
    return bits ^ _LEAST
