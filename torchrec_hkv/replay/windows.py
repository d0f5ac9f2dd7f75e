"""Counts distinct ids in windows of the log, and corrects the misses of a sample by these numbers.

The misses of a table depend on the distribution of reuse distances. So do the numbers of distinct
ids in windows of many lengths. A sample may by chance contain too many ids that return after some
time. A larger sample, whose ids are only counted, shows how many too many. A regression of misses
on these numbers, over groups of ids, gives the effect on the misses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.replay.sample import GROUPS, Sample, SampledIds

#: Number of counted ids for each replayed id.
_TIMES = 16
#: Numbers of lookups in a window.
_SMALL, _LARGE = (1 << 13, 1 << 16, 1 << 19), (1 << 22, 1 << 25, 1 << 28)
_MIN_CELLS, _MAX_CELLS = 1 << 6, 1 << 25
#: Regularisation of the regression, because neighbouring lengths have similar numbers.
_RIDGE = 1e-3


class Windows:
    """Counts distinct ids in windows, over all ids and over the groups of a sample.

    Numbers of lookups would not work, because a single id may have a large share of the lookups but
    no misses. Linear counting of a larger sample gives the numbers over all ids.

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
        rate = self.counted.rate
        within = [(length, _cells(length * rate)) for length in small]
        over = [(length, _cells(length * rate)) for length in large]
        over.append((0, _cells(_MAX_CELLS)))  # the whole log
        self._windows = _C.ReplayWindows(within, over)
        self._within = len(within)
        self._cells = [cells for _, cells in (*within, *over)]
        self._distinct = [0.0] * len(self._cells)

    def update(self, ids: SampledIds, length: int) -> None:
        """Counts a part of the log.

        Args:
            ids: ids in the larger and the smaller sample.
            length: number of lookups in the part.
        """
        self._add(self._windows.see(ids.hashes, ids.positions, ids.smaller, length))

    def _add(self, occupied: list[Tensor]) -> None:
        """Adds the distinct ids of windows that ended.

        Args:
            occupied: occupied cells of these windows, by length.
        """
        for at, (window_cells, cells) in enumerate(zip(occupied, self._cells, strict=True)):
            if at < self._within:
                self._distinct[at] += float(_distinct(window_cells, cells).sum())
                continue
            for window in window_cells:
                self._distinct[at] += float(_distinct(window, cells))

    @functools.cached_property
    def covariates(self) -> tuple[Tensor, Tensor]:
        """Distinct ids in windows of each length, after the end of the log.

        Returns:
            float64 ``[numbers, GROUPS]`` for the sample's groups, and ``[numbers]`` for all ids.
        """
        self._add(self._windows.close())
        of_all = [distinct / self.counted.rate for distinct in self._distinct]
        return self._windows.of_groups.double(), torch.tensor(of_all, dtype=torch.float64)

    def crowding(self, rows: int) -> float:
        """Logarithm of the sample's number of distinct ids over its expected share.

        Args:
            rows: rows of a table; windows with about as many distinct ids are used.
        """
        of_groups, of_all = self.covariates
        ratios = (of_groups.sum(1) / (self.sample.rate * of_all)).clamp(min=1e-9).log()
        sizes = [float(n) / number for n, number in zip(of_all, self._windows.numbers, strict=True)]
        points = sorted(zip(sizes, ratios.tolist(), strict=True))
        for (low, before), (high, after) in itertools.pairwise(points):
            if low <= rows < high:
                return before + math.log(rows / low) / math.log(high / low) * (after - before)
        return points[0][1] if rows < points[0][0] else points[-1][1]


def _cells(lookups: float) -> int:
    """Number of cells: a power of two, about twice the lookups."""
    return 1 << max(min(int(2 * lookups), _MAX_CELLS), _MIN_CELLS).bit_length() - 1


def _distinct(occupied: Tensor, cells: int) -> Tensor:
    """Number of distinct ids, estimated from the number of occupied cells (linear counting)."""
    return -cells * torch.log1p(-occupied.double().clamp(max=cells - 0.5) / cells)


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


def uncrowded(
    hit_rates: Sequence[float], rows: Sequence[int], slots: Sequence[float], windows: Windows
) -> list[float]:
    """Corrects hit rates of a policy's tables for a sample with more or fewer ids than its share,
    and for tables with more slots than their share.

    A sample with more ids makes its tables behave like tables with fewer rows.

    Args:
        hit_rates: hit rates of the tables.
        rows: rows of the tables, ascending.
        slots: slots of the sampled tables, divided by the sampled share of the whole tables' slots.
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
    for at, (hit_rate, count, more) in enumerate(zip(hit_rates, rows, slots, strict=True)):
        crowding = windows.crowding(count) - math.log(more)
        # Interpolate at more rows if the sample has more ids than its share.
        towards = at if crowding > 0 else at - 1
        slope = slopes[min(max(towards, 0), len(slopes) - 1)]
        estimates.append(min(max(hit_rate + max(slope, 0.0) * crowding, 0.0), 1.0))
    return estimates
