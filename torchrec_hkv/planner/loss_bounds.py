"""Prices of memory and time, and the bounds on losses that follow from them.

If only the sum over all ranks is limited, a Lagrangian bounds the loss from below: each table takes
the level with the least sum of loss and price. At the best price this bound is tight, and the
levels are close to the best ones.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torchrec_hkv.planner.levels import LossLevel, TableLevels

Table = tuple[str, str]

#: Number of bisection steps for the logarithm of a price, and its bounds.
_STEPS, _LOWEST, _HIGHEST = 48, -70.0, 40.0


class _Hull:
    """For any price, the level with the least sum of loss and price times size."""

    def __init__(self, levels: Sequence[LossLevel], sizes: Sequence[float]) -> None:
        # Pairs (loss, size), from the largest level with the least loss to the smallest.
        self.points: list[tuple[float, float]] = []
        self.prices: list[float] = []  # above prices[i], point i + 1 is better than point i
        pairs = sorted((level.loss.value, size) for level, size in zip(levels, sizes, strict=True))
        smallest = math.inf
        for loss, size in pairs:
            if size >= smallest:
                continue
            smallest = size
            while self.points:
                at = (loss - self.points[-1][0]) / (self.points[-1][1] - size)
                if not self.prices or at > self.prices[-1]:
                    self.prices.append(at)
                    break
                self.points.pop()
                self.prices.pop()
            self.points.append((loss, size))

    def at(self, price: float) -> tuple[float, float]:
        """Loss and size of the best level at a price."""
        return self.points[bisect.bisect_left(self.prices, price)]


@dataclasses.dataclass(frozen=True)
class LossBound:
    """A lower bound on the loss of plans, given which tables lose quality.

    Attributes:
        price: price of a unit of the scarce resource.
        base: the bound without ``costs``.
        costs: what each table adds to the bound if it loses, for tables that need not lose.
        size: returns how much of the resource a level takes.
        cheapest: the least sum of loss and price, by table.
        capacity: how much of the resource all ranks together have.
    """

    price: float
    base: float
    costs: Mapping[Table, float]
    size: Callable[[LossLevel], float]
    cheapest: Mapping[Table, float]
    capacity: float

    def of(self, tables: Sequence[Table]) -> float:
        """The bound if exactly these tables of ``costs`` lose."""
        return self.base + sum(self.costs[table] for table in tables)


class ScarceResource:
    """A resource of which a plan may take a limited amount: memory or time."""

    def __init__(
        self,
        tables: Mapping[Table, TableLevels],
        size: Callable[[LossLevel], float],
        capacity: float,
    ) -> None:
        """
        Args:
            tables: the levels of each table, at least one.
            size: returns the least of the resource that a level takes over all ranks.
            capacity: how much of the resource all ranks together have.
        """
        self._size, self._capacity = size, capacity
        self._hulls: dict[Table, _Hull] = {}
        self._lossless_size: dict[Table, float] = {}
        self._open: list[Table] = []
        self._fixed = 0.0
        for table, levels in tables.items():
            if levels.lossy:
                sizes = list(map(size, levels.lossy))
                self._hulls[table] = _Hull(levels.lossy, sizes)
            if levels.lossless is not None and levels.lossy:
                self._open.append(table)
                self._lossless_size[table] = size(levels.lossless)
            elif levels.lossless is not None:
                self._fixed += size(levels.lossless)
        self._forced = [table for table in self._hulls if table not in self._lossless_size]

    def max_saving(self, table: Table) -> float:
        """The most that a table can save if it loses."""
        return self._lossless_size[table] - self._hulls[table].points[-1][1]

    def min_lossy_tables(self) -> int | None:
        """The least number of tables that must lose, besides those that always do; None if there is
        not enough even if all lose."""
        used = self._fixed + sum(self._lossless_size.values())
        used += sum(self._hulls[table].points[-1][1] for table in self._forced)
        savings = sorted((max(self.max_saving(table), 0) for table in self._open), reverse=True)
        for count, saved in enumerate([0.0, *savings]):
            used -= saved
            if used <= self._capacity * (1 + 1e-12):
                return count
        return None

    def tables_that_may_lose(self, count: int) -> set[Table]:
        """Tables that may lose something in a plan that fits, including those that must, if
        ``count`` tables lose besides those that must."""
        order = sorted(self._open, key=lambda table: -self.max_saving(table))
        missing, others = self._missing(), self._max_saving_of_tables(count - 1)
        candidates = [
            table for table in order[count:] if others + self.max_saving(table) >= missing
        ]
        return {*self._forced, *order[:count], *candidates}

    def tables_with_largest_savings(self, number: int) -> set[Table]:
        """The ``number`` tables that can save most, among those that need not lose anything."""
        return set(heapq.nlargest(number, self._open, key=self.max_saving))

    def exceeds(self, size: float, count: int) -> bool:
        """Whether a table of this size might save more than one of the ``count`` best tables."""
        return size > self._max_saving_of_tables(count) - self._max_saving_of_tables(count - 1)

    def _max_saving_of_tables(self, count: int) -> float:
        """The most that ``count`` tables can save."""
        spared = heapq.nlargest(max(count, 0), map(self.max_saving, self._open))
        return sum(max(saved, 0.0) for saved in spared)

    def _missing(self) -> float:
        """How much is missing if only the tables that must lose do."""
        used = self._fixed + sum(self._lossless_size.values())
        used += sum(self._hulls[table].points[-1][1] for table in self._forced)
        return used - self._capacity * (1 + 1e-12)

    def bound(self, count: int) -> LossBound:
        """The bound if ``count`` tables lose besides those that must.

        It is very large if there is not enough of the resource.
        """
        if self._used(0.0, count) <= self._capacity:
            return self._bound(0.0)
        low, high = _LOWEST, _HIGHEST
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self._used(math.exp(middle), count) <= self._capacity:
                high = middle
            else:
                low = middle
        return self._bound(math.exp(high))

    def _used(self, price: float, count: int) -> float:
        """How much the best levels at a price take."""
        used = self._fixed + sum(self._hulls[table].at(price)[1] for table in self._forced)
        gains = []
        for table in self._open:
            loss, size = self._hulls[table].at(price)
            lossless_size = self._lossless_size[table]
            used += lossless_size
            gains.append((loss + price * (size - lossless_size), size - lossless_size))
        return used + sum(size for _, size in heapq.nsmallest(count, gains))

    def _bound(self, price: float) -> LossBound:
        cheapest = {}
        for table, hull in self._hulls.items():
            loss, size = hull.at(price)
            cheapest[table] = loss + price * size
        base = price * (self._fixed - self._capacity) + sum(cheapest[t] for t in self._forced)
        base += sum(price * self._lossless_size[table] for table in self._open)
        costs = {
            table: cheapest[table] - price * self._lossless_size[table] for table in self._open
        }
        return LossBound(price, base, costs, self._size, cheapest, self._capacity)


def cheapest_sets(
    costs: Mapping[Table, float], count: int
) -> Iterator[tuple[float, tuple[Table, ...]]]:
    """All sets of ``count`` tables in ascending order of their sum of costs, with that sum.

    Args:
        costs: cost of each table; among equal costs, the first table is preferred.
        count: size of the sets.
    """
    order = sorted(costs, key=lambda table: costs[table])
    values = [costs[table] for table in order]
    if count > len(order):
        return
    first = tuple(range(count))
    waiting = [(sum(values[:count]), first)]
    seen = {first}
    while waiting:
        total, chosen = heapq.heappop(waiting)
        yield total, tuple(order[index] for index in chosen)
        for place, index in enumerate(chosen):
            following = index + 1
            if following == len(order) or (place + 1 < count and chosen[place + 1] == following):
                continue
            other = (*chosen[:place], following, *chosen[place + 1 :])
            if other not in seen:
                seen.add(other)
                heapq.heappush(waiting, (total - values[index] + values[following], other))


def tightest_bound(scarce: Sequence[ScarceResource], count: int) -> LossBound:
    """The largest bound of several resources.

    Args:
        scarce: memory, and time if it is bounded.
        count: number of tables that lose besides those that must.
    """
    bounds = [each.bound(count) for each in scarce]
    return max(
        bounds,
        key=lambda bound: bound.base + sum(itertools.islice(sorted(bound.costs.values()), count)),
    )
