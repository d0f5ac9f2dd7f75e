"""Searches the plan with the least loss: in as few tables, and as little, as memory requires."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.arrangement import Arranged, Arranger
from torchrec_hkv.planner.levels import Level, TableLevels
from torchrec_hkv.planner.prices import Bound, Scarce, Table, cheapest_sets, tightest

#: Up to this number of tables, all sets of tables and combinations of levels are tried that could
#: be better. With more tables, the search is limited.
FEW_TABLES = 12
#: If many tables may lose, at least so many times those that must at least are considered.
_TIMES_AS_MANY = 2
#: Bounds on the number of sets of tables, for few and for many tables.
_MOST_SETS, _FEWER_SETS = 20_000, 24
#: Bounds on the number of arrangements for the sets of one size, and of levels looked at.
_MOST_CHECKS, _FEWEST_CHECKS = 4000, 200
_MOST_LOOKS, _FEWER_LOOKS = 200_000, 2000
#: Number of tables in all arrangements that are tried for many tables.
_MOST_ARRANGED = 60_000
#: Number of bisection steps for the price of a byte in the first answer.
_PRICES = 24
#: Number of sets of tables with equal loss of which the fastest is found.
_MOST_EQUAL = 16
#: Losses that differ by less are equal.
_EQUAL = 1e-12


class Search:
    """Orders plans by the number of tables with loss, then by their total loss, then by the time of
    a step."""

    def __init__(
        self,
        tables: Mapping[Table, TableLevels],
        arranger: Arranger,
        most_loss: float = math.inf,
        most_time: float = math.inf,
    ) -> None:
        """
        Args:
            tables: the levels of each table.
            arranger: finds options for levels.
            most_loss: bound on the loss of all tables together.
            most_time: bound on the time of a step on the slowest rank.
        """
        self._tables, self._arranger = dict(tables), arranger
        self._most_loss, self._most_time = most_loss, most_time
        self._checks = self._looks = 0
        self._are_many = len(self._tables) > FEW_TABLES
        self._most_checks = _MOST_CHECKS
        if self._are_many:
            self._most_checks = max(_MOST_ARRANGED // len(self._tables), _FEWEST_CHECKS)

    def least_loss(self) -> Arranged | None:
        """The first plan in the order of this class; None if none was found.

        The result is optimal if there are few enough sets and arrangements to try all, as for a few
        tables, or a few tables with loss.
        """
        if any(not levels.all for levels in self._tables.values()):
            return None
        scarce = self._scarce()
        fewest = [each.fewest() for each in scarce]
        if any(count is None for count in fewest):
            return None
        forced = [t for t, levels in self._tables.items() if levels.whole is None]
        first = max(count for count in fewest if count is not None)
        last = sum(bool(levels.whole and levels.lossy) for levels in self._tables.values())
        for count in range(first, last + 1):
            self._checks = self._looks = 0
            best = self._best_of(tightest(scarce, count), count, forced, scarce[0])
            plans = [self._fastest(each.levels, each.options) for each in best]
            found = [plan for plan in plans if plan is not None]
            if found:
                return min(found, key=lambda plan: plan.time)
        return None

    def may_lose(self, unlisted: float = 0.0) -> set[Table] | None:
        """Tables that are likely to lose something in the first plan of the order: those that save
        most, and those that may be among the fewest that have to lose.

        Of levels between the smallest and the largest of a table, none need be known. Nor need any
        with loss of tables that take little: None if these might lower the number of tables that
        have to lose, or if there are too few others.

        Args:
            unlisted: bytes of the largest table whose levels with loss are not known.
        """
        if any(not levels.all for levels in self._tables.values()):
            return set()
        scarce = self._scarce()
        fewest = [each.fewest() for each in scarce]
        counts = [count for count in fewest if count is not None]
        if len(counts) < len(fewest):
            return None if unlisted else set()
        count = max(counts)
        most = _TIMES_AS_MANY * count + FEW_TABLES
        if unlisted and (
            most > sum(bool(levels.lossy) for levels in self._tables.values())
            or any(
                each.exceeds(unlisted, count)
                for each, own in zip(scarce, fewest, strict=True)
                if own == count > 0
            )
        ):
            return None
        largest = scarce[fewest.index(count)].largest(most)
        return set.intersection(*(each.may_lose(count) for each in scarce)) | largest

    def _scarce(self) -> list[Scarce]:
        """Memory in total, HBM, host memory, and time if it is bounded."""
        hbm, host = self._arranger.hbm, self._arranger.host
        found = [
            Scarce(self._tables, lambda level: level.total, hbm + host),
            Scarce(self._tables, lambda level: level.hbm, hbm),
            Scarce(self._tables, lambda level: level.host, host),
        ]
        if self._most_time < math.inf and self._arranger.adds_times:
            room = self._most_time * self._arranger.num_ranks * (1 + 1e-9)
            found.append(Scarce(self._tables, self._arranger.least_time, room))
        return found

    def _best_of(
        self, bound: Bound, count: int, forced: Sequence[Table], memory: Scarce
    ) -> list[_Best]:
        """The best plans in which ``count`` tables lose besides those that must. Of few tables, all
        sets of tables with the least loss, up to a number; otherwise one set."""
        best: list[_Best] = []
        limit = math.inf
        most = _FEWER_SETS if self._are_many else _MOST_SETS
        for cost, chosen in itertools.islice(cheapest_sets(bound.costs, count), most):
            if bound.base + cost >= limit:
                break
            found = self._best_with([*forced, *chosen], bound, limit)
            if found is None:
                continue
            if best and found.loss < best[0].loss - _EQUAL:
                best.clear()
            best.append(found)
            looks_on = not self._are_many and len(best) < _MOST_EQUAL
            limit = best[0].loss + (_EQUAL if looks_on else -_EQUAL)
        if not best and self._are_many:
            largest = sorted(bound.costs, key=lambda table: -memory.spared(table))[:count]
            found = self._best_with([*forced, *largest], bound, limit)
            best += [] if found is None else [found]
        return best

    def _best_with(self, chosen: Sequence[Table], bound: Bound, limit: float) -> _Best | None:
        """The best plan in which only ``chosen`` have loss, if it has less than a limit."""
        fixed = {t: levels.whole for t, levels in self._tables.items() if t not in set(chosen)}
        # The table with the most levels comes last: its level is found by bisection.
        free = sorted(chosen, key=lambda table: len(self._tables[table].lossy))
        least = sum(self._tables[table].lossy[0].loss.value for table in free)
        if least > self._most_loss or least >= limit:
            return None
        lossy = [self._tables[table].lossy for table in free]
        if not self._may_fit([level for level in fixed.values() if level is not None], lossy):
            return None
        visit = _Visit(self, list(self._tables), fixed, free, bound, limit)
        if self._are_many and not visit.smallest():
            return None
        visit.by_prices()
        visit.one_by_one()
        visit.all_levels()
        return visit.best

    def _may_fit(self, fixed: Sequence[Level], free: Sequence[Sequence[Level]]) -> bool:
        """Whether the memory of all ranks together is enough for the least that levels take."""
        hbm = sum(level.hbm for level in fixed) + sum(min(x.hbm for x in own) for own in free)
        host = sum(level.host for level in fixed) + sum(min(x.host for x in own) for own in free)
        total = sum(level.total for level in fixed) + sum(min(x.total for x in own) for own in free)
        return self._arranger.has(hbm, host, total)

    def check(self, levels: Sequence[Level]) -> list[ShardingOption] | None:
        """Options of these levels that fit within the bound on time; None if none are found, or if
        the number of checks is exhausted."""
        if self._checks >= self._most_checks:
            return None
        if not self.may_fit(levels):
            return None
        is_timed = self._most_time < math.inf
        if is_timed and not self._arranger.may_take(levels, self._most_time):
            return None
        self._checks += 1
        options = self._arranger.fitting(levels)
        if options is None or not is_timed:
            return options
        self._checks += 20
        fastest = self._fastest(levels, options)
        return fastest.options if fastest is not None and fastest.time <= self._most_time else None

    def may_fit(self, levels: Sequence[Level]) -> bool:
        """Whether the memory of all ranks together is enough for levels."""
        return self._arranger.has(*_sums(levels))

    def has(self, hbm: int, host: int, total: int) -> bool:
        """Whether all ranks together have this much memory."""
        return self._arranger.has(hbm, host, total)

    def look(self) -> bool:
        """Counts a level that is looked at; False if there were too many."""
        self._looks += 1
        return self._looks <= (_FEWER_LOOKS if self._are_many else _MOST_LOOKS)

    def _fastest(self, levels: Sequence[Level], options: list[ShardingOption]) -> Arranged | None:
        return self._arranger.fastest([[level] for level in levels], [options])

    @property
    def most_loss(self) -> float:
        """Bound on the loss of all tables together."""
        return self._most_loss

    def lossy(self, table: Table) -> tuple[Level, ...]:
        """The levels of a table with loss, least first."""
        return self._tables[table].lossy


@dataclasses.dataclass(frozen=True)
class _Best:
    """Levels that fit, with options that prove it."""

    loss: float
    levels: list[Level]
    options: list[ShardingOption]


class _Visit:
    """Tries the levels of some tables, with fixed levels for all others.

    Attributes:
        best: the best plan so far with less loss than the limit.
    """

    def __init__(
        self,
        search: Search,
        names: Sequence[Table],
        fixed: Mapping[Table, Level | None],
        free: Sequence[Table],
        bound: Bound,
        limit: float,
    ) -> None:
        self._search, self._names, self._fixed, self._free = search, names, fixed, free
        self._bound, self._limit = bound, limit
        self.best: _Best | None = None
        self._own: dict[Table, Level] | None = None  # of these tables, the best so far
        self._tried: dict[tuple[int, ...], bool] = {}
        self._taken = _sums(level for level in fixed.values() if level is not None)
        # Loss and price of the other tables, and of the free ones from each place on, at least.
        taken = sum(bound.size(level) for level in fixed.values() if level is not None)
        self._base = bound.price * (taken - bound.room)
        costs = [bound.cheapest[table] for table in free]
        self._after = [*itertools.accumulate(reversed(costs), initial=0.0)][::-1]

    def _try(self, chosen: Mapping[Table, Level]) -> bool:
        """Whether levels fit. Keeps them if they have less loss than the best so far."""
        key = tuple(id(chosen[table]) for table in self._free)
        if key in self._tried:
            return self._tried[key]
        levels = [chosen.get(name) or self._fixed[name] for name in self._names]
        options = self._search.check([level for level in levels if level is not None])
        self._tried[key] = options is not None
        if options is None:
            return False
        loss = _loss(chosen)
        if loss <= self._search.most_loss and self._is_better(loss):
            self.best = _Best(loss, [level for level in levels if level is not None], options)
        if self._own is None or loss < _loss(self._own):
            self._own = dict(chosen)
        return True

    def smallest(self) -> bool:
        """Whether the smallest levels fit."""
        return self._try(
            {table: min(self._search.lossy(table), key=self._bound.size) for table in self._free}
        )

    def by_prices(self) -> None:
        """Finds a first answer: each table takes the level with the lowest sum of loss and price of
        what is scarce, at the lowest price at which the levels fit."""
        if len(self._free) < 2:
            return
        size = self._bound.size
        low, high = -70.0, 10.0  # logarithms of prices
        for _ in range(_PRICES):
            middle = (low + high) / 2
            price = math.exp(middle)
            chosen = {
                table: min(
                    self._search.lossy(table),
                    key=lambda level: level.loss.value + price * size(level),
                )
                for table in self._free
            }
            if self._try(chosen):
                high = middle
            else:
                low = middle

    def one_by_one(self) -> None:
        """Gives what is left to one table after the other, while the loss becomes less."""
        if len(self._free) < 3 or self._own is None:
            return
        before = math.inf
        while _loss(self._own) < before - _EQUAL:
            before = _loss(self._own)
            for table in sorted(self._free, key=lambda t: -self._own[t].loss.value):
                others = {other: self._own[other] for other in self._free if other != table}
                self._last(table, others, _loss(others), self._own[table].loss.value)

    def all_levels(self, chosen: Mapping[Table, Level] | None = None, cost: float = 0.0) -> None:
        """Tries all combinations of levels that may have less loss than the best so far.

        Args:
            chosen: the levels of the first tables.
            cost: their loss and price.
        """
        chosen = dict(chosen or {})
        place = len(chosen)
        rest = self._free[place:]
        if not rest:
            self._try(chosen)
            return
        known = _loss(chosen)
        if len(rest) == 1:
            self._last(rest[0], chosen, known)
            return
        after = sum(self._search.lossy(table)[0].loss.value for table in rest[1:])
        price, size = self._bound.price, self._bound.size
        for level in self._search.lossy(rest[0]):
            loss = level.loss.value
            if not self._search.look() or not self._is_better(known + loss + after):
                break
            then = cost + loss + price * size(level)
            if self._is_better(self._base + then + self._after[place + 1]):
                self.all_levels({**chosen, rest[0]: level}, then)

    def _is_better(self, loss: float) -> bool:
        limit = self._limit if self.best is None else self.best.loss - _EQUAL
        return loss < limit and loss <= self._search.most_loss + _EQUAL

    def _last(
        self, table: Table, chosen: Mapping[Table, Level], known: float, most: float = math.inf
    ) -> None:
        """Finds the level of the last table: in each chain, the largest size that fits.

        Args:
            table: the table.
            chosen: the levels of the other tables.
            known: their loss.
            most: only levels with less loss are tried.
        """
        chains: dict[tuple[str, ...], list[Level]] = {}
        for level in self._search.lossy(table):
            if level.loss.value >= most:
                break
            chains.setdefault(level.chain, []).append(level)
        hbm, host, total = map(sum, zip(self._taken, _sums(chosen.values()), strict=True))
        for chain in sorted(chains.values(), key=lambda levels: levels[0].loss.value):
            if most == math.inf:
                own = [level for level in chain if self._is_better(known + level.loss.value)]
            else:
                own = chain
            # Those before `low` do not fit.
            low = _first(
                own,
                lambda level: self._search.has(
                    hbm + level.hbm, host + level.host, total + level.total
                ),
            )
            _first(own, lambda level: self._try({**chosen, table: level}), low)


def _sums(levels: Iterable[Level]) -> tuple[int, int, int]:
    """The least HBM, host memory and memory in total that levels take."""
    hbm = host = total = 0
    for level in levels:
        hbm, host, total = hbm + level.hbm, host + level.host, total + level.total
    return hbm, host, total


def _first(levels: Sequence[Level], fits: Callable[[Level], bool], low: int = 0) -> int:
    """Bisection for the first level that fits, the largest of a chain coming first."""
    high = len(levels)
    while low < high:
        middle = (low + high) // 2
        if fits(levels[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _loss(chosen: Mapping[Table, Level]) -> float:
    return sum(level.loss.value for level in chosen.values())
