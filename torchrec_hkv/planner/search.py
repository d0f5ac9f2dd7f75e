"""Searches the plan in which the fewest tables lose quality, and lose as little as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.level_search import EQUAL, BestLevels, LevelSearch, memory_of
from torchrec_hkv.planner.levels import LossLevel, TableLevels
from torchrec_hkv.planner.loss_bounds import (
    LossBound,
    ScarceResource,
    Table,
    cheapest_sets,
    tightest_bound,
)
from torchrec_hkv.planner.option_selection import FEW_TABLES, FittingPlan, OptionSelector

#: If there are many tables: at least this many times the number of tables that must lose are
#: considered.
_TIMES_AS_MANY = 2
#: Bounds on the number of sets of tables, for few and for many tables.
_MAX_SETS, _FEWER_SETS = 20_000, 24
#: Bounds on the selections that are tried for the sets of one size, and on the levels looked at.
_MAX_CHECKS, _FEWEST_CHECKS = 4000, 200
_MAX_LOOKS, _FEWER_LOOKS = 200_000, 2000
#: For many tables: bound on the selections times the number of tables (or the number of ranks
#: over _RANKS_OF_TABLE, if that is larger).
_MAX_SELECTIONS, _RANKS_OF_TABLE = 60_000, 4
#: Number of counts of tables with loss that are tried one after the other.
_FIRST_COUNTS = 16
#: Number of sets of tables with equal loss among which the fastest is found.
_MAX_EQUAL = 16


class LeastLossSearch:
    """Orders plans by the number of tables with loss, then by their total loss, then by the time of
    a step."""

    def __init__(
        self,
        tables: Mapping[Table, TableLevels],
        option_selector: OptionSelector,
        max_loss: float = math.inf,
        max_time: float = math.inf,
    ) -> None:
        """
        Args:
            tables: the levels of each table.
            option_selector: finds options for levels.
            max_loss: bound on the loss of all tables together.
            max_time: bound on the time of a step on the slowest rank.
        """
        self._tables, self._option_selector = dict(tables), option_selector
        self._max_loss, self._max_time = max_loss, max_time
        self._checks = self._visited_levels = 0
        self._are_many = len(self._tables) > FEW_TABLES
        self._max_checks = _MAX_CHECKS
        if self._are_many:
            size = max(len(self._tables), option_selector.num_ranks // _RANKS_OF_TABLE)
            self._max_checks = max(_MAX_SELECTIONS // size, _FEWEST_CHECKS)

    def least_loss(self) -> FittingPlan | None:
        """The first plan in the order of this class; None if none was found.

        The result is optimal if all sets and selections can be tried, as with a few tables, or a
        few tables with loss.
        """
        if any(not levels.all for levels in self._tables.values()):
            return None
        scarce = self._scarce_resources()
        fewest = [each.min_lossy_tables() for each in scarce]
        if any(count is None for count in fewest):
            return None
        forced = [t for t, levels in self._tables.items() if levels.lossless is None]
        first = max(count for count in fewest if count is not None)
        last = sum(bool(levels.lossless and levels.lossy) for levels in self._tables.values())
        for count in self._counts(scarce, first, last, forced):
            self._checks = self._visited_levels = 0
            best = self._best_of(tightest_bound(scarce, count), count, forced, scarce[0])
            plans = [self._fastest(each.levels, each.options) for each in best]
            found = [plan for plan in plans if plan is not None]
            if found:
                return min(found, key=lambda plan: plan.time)
        return None

    def _counts(
        self, scarce: Sequence[ScarceResource], first: int, last: int, forced: Sequence[Table]
    ) -> Iterator[int]:
        """The numbers of tables with loss to try, in ascending order. If there are many tables, a
        bisection skips numbers, after the first few, with which even the smallest levels do not
        fit."""
        following = first + _FIRST_COUNTS
        yield from range(first, min(following, last + 1))
        if not self._are_many:
            yield from range(following, last + 1)
            return
        below, step = following - 1, 1
        while below < last:
            count = min(below + step, last)
            if self._fits_with(scarce, count, forced):
                break
            below, step = count, 2 * step
        else:
            return
        while count - below > 1:
            middle = (below + count) // 2
            if self._fits_with(scarce, middle, forced):
                count = middle
            else:
                below = middle
        yield from range(count, last + 1)

    def _fits_with(
        self, scarce: Sequence[ScarceResource], count: int, forced: Sequence[Table]
    ) -> bool:
        """Whether the smallest levels fit if the cheapest set of ``count`` tables loses, or the
        tables that save most."""
        self._checks = 0
        bound = tightest_bound(scarce, count)
        sets = [chosen for _, chosen in itertools.islice(cheapest_sets(bound.costs, count), 1)]
        order = sorted(bound.costs, key=lambda table: -scarce[0].max_saving(table))
        return any(
            self._level_search([*forced, *chosen], bound, math.inf).try_smallest()
            for chosen in [*sets, order[:count]]
        )

    def tables_that_may_lose(self, unlisted: float = 0.0) -> set[Table] | None:
        """Tables that are likely to lose something in the first plan of the order: those that save
        most, and those that may be among the fewest that have to lose.

        A table's smallest and largest level suffice. For small tables, levels with loss may be
        missing. The result is None if such tables might lower the number of tables that have to
        lose, or if there are too few others.

        Args:
            unlisted: bytes of the largest table whose levels with loss are missing.
        """
        if any(not levels.all for levels in self._tables.values()):
            return set()
        scarce = self._scarce_resources()
        fewest = [each.min_lossy_tables() for each in scarce]
        counts = [count for count in fewest if count is not None]
        if len(counts) < len(fewest):
            return None if unlisted else set()
        count = max(counts)
        maximum = _TIMES_AS_MANY * count + FEW_TABLES
        if unlisted and (
            maximum > sum(bool(levels.lossy) for levels in self._tables.values())
            or any(
                each.exceeds(unlisted, count)
                for each, minimal in zip(scarce, fewest, strict=True)
                if minimal == count > 0
            )
        ):
            return None
        largest = scarce[fewest.index(count)].tables_with_largest_savings(maximum)
        return set.intersection(*(each.tables_that_may_lose(count) for each in scarce)) | largest

    def _scarce_resources(self) -> list[ScarceResource]:
        """The resources: total memory, HBM, host memory, and time if it is bounded."""
        hbm, host = self._option_selector.hbm, self._option_selector.host
        found = [
            ScarceResource(self._tables, lambda level: level.total, hbm + host),
            ScarceResource(self._tables, lambda level: level.hbm, hbm),
            ScarceResource(self._tables, lambda level: level.host, host),
        ]
        if self._max_time < math.inf and self._option_selector.adds_times:
            total_time = self._max_time * self._option_selector.num_ranks * (1 + 1e-9)
            found.append(ScarceResource(self._tables, self._option_selector.min_time, total_time))
        return found

    def _best_of(
        self, bound: LossBound, count: int, forced: Sequence[Table], memory: ScarceResource
    ) -> list[BestLevels]:
        """The best plans in which ``count`` tables lose besides those that must. With few tables:
        one per set of tables with the least loss, up to a bound; otherwise one plan."""
        best: list[BestLevels] = []
        limit = math.inf
        maximum = _FEWER_SETS if self._are_many else _MAX_SETS
        for cost, chosen in itertools.islice(cheapest_sets(bound.costs, count), maximum):
            if bound.base + cost >= limit:
                break
            found = self._best_with([*forced, *chosen], bound, limit)
            if found is None:
                continue
            if best and found.loss < best[0].loss - EQUAL:
                best.clear()
            best.append(found)
            looks_on = not self._are_many and len(best) < _MAX_EQUAL
            limit = best[0].loss + (EQUAL if looks_on else -EQUAL)
        if not best and self._are_many:
            largest = sorted(bound.costs, key=lambda table: -memory.max_saving(table))[:count]
            found = self._best_with([*forced, *largest], bound, limit)
            best += [] if found is None else [found]
        return best

    def _best_with(
        self, chosen: Sequence[Table], bound: LossBound, limit: float
    ) -> BestLevels | None:
        """The best plan in which only ``chosen`` lose; None if its loss is not below a limit."""
        minimum = sum(self._tables[table].lossy[0].loss.value for table in chosen)
        if minimum > self._max_loss or minimum >= limit:
            return None
        lossy, lost = [self._tables[table].lossy for table in chosen], set(chosen)
        fixed = [levels.lossless for table, levels in self._tables.items() if table not in lost]
        if not self._may_fit([level for level in fixed if level is not None], lossy):
            return None
        level_search = self._level_search(chosen, bound, limit)
        if self._are_many and not level_search.try_smallest():
            return None
        level_search.search_by_price()
        level_search.improve_single_tables()
        if self._are_many:
            level_search.improve_pairs()
        level_search.search_all()
        return level_search.best

    def _level_search(self, chosen: Sequence[Table], bound: LossBound, limit: float) -> LevelSearch:
        lost = set(chosen)
        fixed = {t: levels.lossless for t, levels in self._tables.items() if t not in lost}
        # The table with the most levels comes last, where a bisection finds its level.
        free = sorted(chosen, key=lambda table: len(self._tables[table].lossy))
        return LevelSearch(self, list(self._tables), fixed, free, bound, limit)

    def _may_fit(self, fixed: Sequence[LossLevel], free: Sequence[Sequence[LossLevel]]) -> bool:
        """Whether all ranks together have memory for the fixed and the smallest free levels."""
        hbm = sum(level.hbm for level in fixed) + sum(min(x.hbm for x in levels) for levels in free)
        host = sum(level.host for level in fixed) + sum(
            min(x.host for x in levels) for levels in free
        )
        total = sum(level.total for level in fixed) + sum(
            min(x.total for x in levels) for levels in free
        )
        return self._option_selector.has_memory(hbm, host, total)

    def check(self, levels: Sequence[LossLevel]) -> list[ShardingOption] | None:
        """Options of these levels that fit and keep the bound on time; None if none are found, or
        if the number of checks is exhausted."""
        if self.is_exhausted:
            return None
        if not self.may_fit(levels):
            return None
        is_timed = self._max_time < math.inf
        if is_timed and not self._option_selector.may_be_within_time(levels, self._max_time):
            return None
        self._checks += 1
        options = self._option_selector.find_fitting(levels)
        if options is None or not is_timed:
            return options
        self._checks += 20
        fastest = self._fastest(levels, options)
        return fastest.options if fastest is not None and fastest.time <= self._max_time else None

    @property
    def is_exhausted(self) -> bool:
        """Whether the bound on selections is reached."""
        return self._checks >= self._max_checks

    def may_fit(self, levels: Sequence[LossLevel]) -> bool:
        """Whether all ranks together have memory for levels."""
        return self._option_selector.has_memory(*memory_of(levels))

    def has_memory(self, hbm: int, host: int, total: int) -> bool:
        """Whether all ranks together have this much memory."""
        return self._option_selector.has_memory(hbm, host, total)

    def count_visited_level(self) -> bool:
        """Counts a level that is looked at; False once there were too many."""
        self._visited_levels += 1
        return self._visited_levels <= (_FEWER_LOOKS if self._are_many else _MAX_LOOKS)

    def _fastest(
        self, levels: Sequence[LossLevel], options: list[ShardingOption]
    ) -> FittingPlan | None:
        return self._option_selector.find_fastest([[level] for level in levels], [options])

    @property
    def rank_memory(self) -> float:
        """Mean memory of a rank."""
        return (
            self._option_selector.hbm + self._option_selector.host
        ) / self._option_selector.num_ranks

    @property
    def max_loss(self) -> float:
        """Bound on the loss of all tables together."""
        return self._max_loss

    def lossy(self, table: Table) -> tuple[LossLevel, ...]:
        """The levels of a table with loss, least first."""
        return self._tables[table].lossy
