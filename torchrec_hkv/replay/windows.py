"""Counts distinct ids in windows of the log, and corrects the misses of a sample by them.

The misses of a table depend on the distribution of reuse distances, and so do the numbers of
distinct ids in windows of many lengths. A sample may by chance contain too many ids that return
after some time. A larger sample, whose ids are only counted, shows by how much. A regression of
misses on these numbers, over groups of ids, gives the effect on the misses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import HashTable
from torchrec_hkv.replay.counting import growing_table
from torchrec_hkv.replay.sample import GROUPS, Sample, groups_of

#: Number of counted ids for each replayed id.
_TIMES = 16
#: Lookups in a window.
_SMALL, _LARGE = (1 << 13, 1 << 16, 1 << 19), (1 << 22, 1 << 25, 1 << 28)
_LEAST_CELLS, _MOST_CELLS = 1 << 6, 1 << 25
_ODD = -7046029254386353131
#: Regularisation of the regression, because neighbouring lengths have similar numbers.
_RIDGE = 1e-3


class Windows:
    """Counts distinct ids in windows, over all ids and over the groups of a sample.

    Numbers of lookups would not do, because one id may have a large share of the lookups and no
    miss.

    Args:
        sample: the ids that are replayed.
        small: lookups in windows that lie within one part of the log.
        large: lookups in windows over several parts.
    """

    def __init__(
        self, sample: Sample, small: Sequence[int] = _SMALL, large: Sequence[int] = _LARGE
    ) -> None:
        self.sample = sample
        self.counted = Sample(min(1.0, _TIMES * sample.rate))
        self._small = [_Small(length, self.counted) for length in small]
        self._large = [_Large(length, self.counted) for length in (*large, None)]

    def see(self, bits: Tensor, at: Tensor, sampled: Tensor, length: int) -> None:
        """Counts a part of the log.

        Args:
            bits: int64 ``[n]``, hashes of the counted ids by :func:`mixed`.
            at: int64 ``[n]``, ascending, positions of the counted ids in the part.
            sampled: int64 ``[m]``, ascending, indices of the replayed ids among the counted ones.
            length: number of lookups in the part.
        """
        ours, places = bits[sampled], at[sampled]
        for small in self._small:
            small.see(bits, at, ours, places, length)
        for large in self._large:
            large.see(bits, at, ours, places, length)

    @functools.cached_property
    def covariates(self) -> tuple[Tensor, Tensor]:
        """Distinct ids in windows of each length, after the end of the log.

        Returns:
            float64 ``[numbers, GROUPS]`` for the sample's groups, and ``[numbers]`` for all ids.
        """
        for window in self._large:
            window.close()
        windows = [*self._small, *self._large]
        of_groups = torch.stack([window.of_groups for window in windows])
        of_all = [window.counted / self.counted.rate for window in windows]
        return of_groups, torch.tensor(of_all, dtype=torch.float64)

    def crowding(self, rows: int) -> float:
        """Logarithm of the sample's number of distinct ids over its expected share.

        Args:
            rows: rows of a table; windows with about as many distinct ids are used.
        """
        of_groups, of_all = self.covariates
        ratios = (of_groups.sum(1) / (self.sample.rate * of_all)).clamp(min=1e-9).log()
        windows = [*self._small, *self._large]
        sizes = [float(n) / window.number for n, window in zip(of_all, windows, strict=True)]
        known = sorted(zip(sizes, ratios.tolist(), strict=True))
        for (low, before), (high, after) in itertools.pairwise(known):
            if low <= rows < high:
                return before + math.log(rows / low) / math.log(high / low) * (after - before)
        return known[0][1] if rows < known[0][0] else known[-1][1]


class _Small:
    """Windows that lie within one part."""

    def __init__(self, length: int, counted: Sample) -> None:
        self._length = length
        self._cells = _cells(length * counted.rate)
        self.counted, self.number = 0.0, 0
        self.of_groups = torch.zeros(GROUPS, dtype=torch.float64)

    def see(self, bits: Tensor, at: Tensor, ours: Tensor, places: Tensor, length: int) -> None:
        number = -(-length // self._length)
        cells = torch.zeros(number * self._cells, dtype=torch.uint8)
        cells.index_fill_(0, (at // self._length) * self._cells + (bits & (self._cells - 1)), 1)
        taken = cells.view(number, self._cells).count_nonzero(dim=1)
        self.counted += float(_distinct(taken, self._cells).sum())
        self.number += number
        # An id counts once in a window.
        keys, order = (ours ^ (places // self._length * _ODD)).sort()
        is_first = torch.ones(keys.numel(), dtype=torch.bool)
        is_first[1:] = keys[1:] != keys[:-1]
        first = groups_of(ours[order[is_first]])
        self.of_groups += torch.bincount(first, minlength=GROUPS)


class _Large:
    """Windows over several parts. With a length of None, one window covers the whole log."""

    def __init__(self, length: int | None, counted: Sample) -> None:
        self._length, self._seen = length, 0
        self._cells = _cells(_MOST_CELLS if length is None else length * counted.rate)
        self._taken: Tensor | None = None
        self._ids: HashTable | None = None
        self._is_open = False
        self.counted, self.number = 0.0, 0
        self.of_groups = torch.zeros(GROUPS, dtype=torch.float64)

    def see(self, bits: Tensor, at: Tensor, ours: Tensor, places: Tensor, length: int) -> None:
        ends = [length]
        if self._length is not None:
            first = self._length - self._seen % self._length
            ends = [*range(first, length, self._length), length]
        bounds = torch.tensor(ends)
        begin = begin_ours = 0
        for end, end_all, end_ours in zip(
            ends,
            torch.searchsorted(at, bounds).tolist(),
            torch.searchsorted(places, bounds).tolist(),
            strict=True,
        ):
            self._add(bits[begin:end_all], ours[begin_ours:end_ours])
            begin, begin_ours = end_all, end_ours
            if self._length is not None and (self._seen + end) % self._length == 0:
                self.close()
        self._seen += length

    def _add(self, bits: Tensor, ours: Tensor) -> None:
        if self._taken is None or self._ids is None:
            self._taken = torch.zeros(self._cells, dtype=torch.uint8)
            self._ids = growing_table("windows", 1 / 16)
        self._is_open = True
        self._taken.index_fill_(0, bits & (self._cells - 1), 1)
        ours = ours.unique()
        is_new = ~self._ids.find_or_insert_slots(ours)[1]
        self.of_groups += torch.bincount(groups_of(ours[is_new]), minlength=GROUPS)

    def close(self) -> None:
        """Ends the window."""
        if self._taken is None or self._ids is None or not self._is_open:
            return
        self._is_open = False
        self.number += 1
        taken = self._taken.count_nonzero()
        self.counted += float(_distinct(taken, self._cells))
        self._taken.zero_()
        self._ids.clear()


def _cells(lookups: float) -> int:
    """Number of cells: a power of two, about twice the lookups."""
    return 1 << max(min(int(2 * lookups), _MOST_CELLS), _LEAST_CELLS).bit_length() - 1


def _distinct(taken: Tensor, cells: int) -> Tensor:
    """Number of distinct ids, estimated from the number of occupied cells (linear counting)."""
    return -cells * torch.log1p(-taken.double().clamp(max=cells - 0.5) / cells)


def corrected(misses: Tensor, windows: Windows, lookups: int) -> tuple[float, float]:
    """Estimates the misses of all ids, as a share of lookups, with the standard error.

    Args:
        misses: ``[GROUPS]``, misses of the sample's groups.
        windows: windows that counted the same ids.
        lookups: lookups in the whole log.
    """
    rate, larger = windows.sample.rate, windows.counted.rate
    of_groups, of_all = windows.covariates
    misses = misses.double()
    centred = of_groups - of_groups.mean(1, keepdim=True)
    # Numbers may be constant over groups, or multiples of each other.
    scale = centred.norm(dim=1, keepdim=True).clamp(min=1e-9)
    centred = centred / scale
    shifted = misses - misses.mean()
    gram = centred @ centred.T + _RIDGE * torch.eye(len(centred), dtype=torch.float64)
    slopes = torch.linalg.solve(gram, centred @ shifted)
    missing = (rate * of_all - of_groups.sum(1)) / scale.squeeze(1)
    total = float(misses.sum() + slopes @ missing)
    fitted = slopes @ centred
    # The unexplained part has the sample's uncertainty, the explained part that of the larger
    # sample.
    unexplained = float(((shifted - fitted) ** 2).sum()) * GROUPS / (GROUPS - len(centred))
    explained = float((fitted**2).sum()) * GROUPS / (GROUPS - 1) * rate / larger
    variance = unexplained * (1 - rate) + explained * (1 - larger)
    return total / (rate * lookups), math.sqrt(max(variance, 0.0)) / (rate * lookups)


def uncrowded(hit_rates: Sequence[float], rows: Sequence[int], windows: Windows) -> list[float]:
    """Corrects hit rates of a policy's tables for a sample with more or fewer ids than its share.

    A sample with more ids makes its tables behave like tables with fewer rows.

    Args:
        hit_rates: hit rates of the tables.
        rows: rows of the tables, ascending.
        windows: windows that counted the same ids.
    """
    if len(rows) < 2:
        return list(hit_rates)
    slopes = [
        (high - low) / math.log(more / fewer)
        for (low, high), (fewer, more) in zip(
            itertools.pairwise(hit_rates), itertools.pairwise(rows), strict=True
        )
    ]
    estimates = []
    for at, (hit_rate, count) in enumerate(zip(hit_rates, rows, strict=True)):
        crowding = windows.crowding(count)
        # Interpolate at more rows if the sample has more ids than its share.
        towards = at if crowding > 0 else at - 1
        slope = slopes[min(max(towards, 0), len(slopes) - 1)]
        estimates.append(min(max(hit_rate + max(slope, 0.0) * crowding, 0.0), 1.0))
    return estimates
