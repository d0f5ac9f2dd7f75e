"""Merges the rows, states and scores of an id over replicas, by sums and maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_hkv.hash_table.eviction import name_of, sums_scores
from torchrec_hkv.hash_table.table_spec import TableSpec

_MIN = -(1 << 63)
_LOW = 0xFFFFFFFF


def merged_values(
    sums: Tensor, replicas: int, in_last_sync: Tensor, initial: Callable[[Tensor], Tensor]
) -> Tensor:
    """The merged rows and states.

    Args:
        sums: float32 ``[n, columns + 2]``, overwritten. The sums of rows and states over the
            replicas that have the id, then the number of these replicas, then the number of those
            that had the id at the last sync.
        replicas: number of replicas.
        in_last_sync: bool ``[n]``, whether a replica that touched or lost the id had it at the last
            sync.
        initial: returns the initial rows, float32 ``[m, dim]``, for indices of ids, int64 ``[m]``.

    Returns:
        float32 ``[n, columns]``.
    """
    values, holders, olds = sums[:, :-2], sums[:, -2], sums[:, -1]
    is_new = ~(in_last_sync | (olds > 0))
    lacking = (is_new & (holders < replicas)).nonzero().flatten()
    if lacking.numel():
        rows = initial(lacking)
        values[lacking, : rows.shape[1]] += (replicas - holders[lacking])[:, None] * rows
    return values.div_(torch.where(is_new, float(replicas), holders)[:, None])


class ScoreMerge:
    """Converts scores of a policy to numbers that are summed or maximized over replicas.

    Args:
        spec: the table's spec.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._policy = name_of(spec.eviction)
        self.adds = sums_scores(spec.eviction)

    def lowest(self, n: int, device: torch.device) -> Tensor:
        """The numbers to maximize for ids that a replica does not have, int64 ``[n]``."""
        return torch.full((n,), _MIN, dtype=torch.int64, device=device)

    def highest_of(self, scores: Tensor, before: Tensor, touched: Tensor) -> Tensor:
        """The numbers to maximize, int64 ``[n]``.

        Args:
            scores: int64 ``[n]``, scores of ids that a replica has.
            before: int64 ``[n]``, scores at the last sync; 0 if unknown.
            touched: bool ``[n]``, whether the replica touched the id.
        """
        if self.adds:
            before = torch.where(touched, before, scores)
        if self._policy == "epoch_lfu":
            # The current epoch, and the count at the last sync.
            return _ordered(scores & ~_LOW | before & _LOW)
        if self.adds:
            return before
        if self._policy == "customized":
            return torch.where(touched, scores, _MIN)
        return _ordered(scores)

    def added(self, scores: Tensor, before: Tensor, touched: Tensor) -> Tensor:
        """The numbers to sum: lookups since the last sync, int64 ``[n]``."""
        if self._policy == "epoch_lfu":
            scores, before = scores & _LOW, before & _LOW
        # The count of an id that left and came back since then starts at its return.
        more = torch.where(scores >= before, scores - before, scores)
        return torch.where(touched, more, 0)

    def merged(self, highest: Tensor, added: Tensor | None) -> Tensor:
        """The merged scores, int64 ``[n]``, from the maxima and the sums."""
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
    """Converts unsigned numbers to signed numbers in the same order, and back."""
    return bits ^ _MIN
