"""Searches the plan with the least loss: in as few tables, and as little, as memory requires."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.arrangement import Arranged, Arranger
from torchrec_hkv.planner.levels import Level, TableLevels

#: Bounds on the number of sets of tables of one size, and of arrangements for all of them.
_MOST_SETS, _MOST_CHECKS = 2000, 4000
#: Number of bisection steps for the price of a byte in the first answer.
_PRICES = 24

Table = tuple[str, str]


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
        self._checks = 0

    def least_loss(self) -> Arranged | None:
        """The first plan in the order of this class; None if none was found.

        The result is optimal if there are few enough sets and arrangements to try all, as for a few
        tables, or a few tables with loss.
        """
        if any(not levels.all for levels in self._tables.values()):
            return None
        open_tables = [t for t, levels in self._tables.items() if levels.whole and levels.lossy]
        forced = [t for t, levels in self._tables.items() if levels.whole is None]
        for count in range(len(open_tables) + 1):
            self._checks = 0
            best: _Best | None = None
            for chosen in self._sets(open_tables, count):
                best = self._best_of({*forced, *chosen}, best)
            if best is not None:
                return self._fastest(best.levels, best.options)
        return None

    def _sets(self, tables: Sequence[Table], count: int) -> Iterator[tuple[Table, ...]]:
        """Sets of ``count`` tables, those first that save the most memory."""
        order = sorted(tables, key=lambda table: -self._spared(table))
        if math.comb(len(order), count) <= _MOST_SETS:
            yield from itertools.combinations(order, count)
            return
        first = order[:count]
        yield tuple(first)
        swaps = itertools.product(range(count - 1, -1, -1), order[count:])
        for index, other in itertools.islice(swaps, _MOST_SETS):
            yield (*first[:index], other, *first[index + 1 :])

    def _spared(self, table: Table) -> int:
        levels = self._tables[table]
        assert levels.whole is not None
        whole = levels.whole.hbm + levels.whole.host
        return whole - min(level.hbm + level.host for level in levels.lossy)

    def _best_of(self, chosen: set[Table], best: _Best | None) -> _Best | None:
        """The better of the known answer and the best one in which only ``chosen`` have loss."""
        names = list(self._tables)
        fixed = {t: levels.whole for t, levels in self._tables.items() if t not in chosen}
        # The table with the most levels comes last: its level is found by bisection.
        free = sorted((t for t in names if t in chosen), key=lambda t: len(self._tables[t].lossy))
        least = sum(self._tables[t].lossy[0].loss.value for t in free)
        if least > self._most_loss or (best is not None and least >= best.loss):
            return best
        smallest = [
            min(self._tables[t].lossy, key=lambda level: level.hbm + level.host)
            if t in chosen
            else fixed[t]
            for t in names
        ]
        if not self._arranger.may_fit(level for level in smallest if level is not None):
            return best
        visit = _Visit(self, names, fixed, free, best)
        visit.by_prices()
        visit.all_levels()
        return visit.best

    def check(self, levels: Sequence[Level]) -> list[ShardingOption] | None:
        """Options of these levels that fit within the bound on time; None if none are found, or if
        the number of checks is exhausted."""
        if not self._arranger.may_fit(levels) or self._checks >= _MOST_CHECKS:
            return None
        self._checks += 1
        options = self._arranger.fitting(levels)
        if options is None or self._most_time == math.inf:
            return options
        self._checks += 20
        fastest = self._fastest(levels, options)
        return fastest.options if fastest is not None and fastest.time <= self._most_time else None

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
    """Tries the levels of some tables, with fixed levels for all others."""

    def __init__(
        self,
        search: Search,
        names: Sequence[Table],
        fixed: Mapping[Table, Level | None],
        free: Sequence[Table],
        best: _Best | None,
    ) -> None:
        self._search, self._names, self._fixed, self._free = search, names, fixed, free
        self.best = best

    def _try(self, chosen: Mapping[Table, Level]) -> bool:
        """Whether levels fit. Keeps them if they have less loss than the best so far."""
        loss = sum(level.loss.value for level in chosen.values())
        levels = [chosen.get(name) or self._fixed[name] for name in self._names]
        options = self._search.check([level for level in levels if level is not None])
        if options is None:
            return False
        if loss <= self._search.most_loss and (self.best is None or loss < self.best.loss):
            self.best = _Best(loss, [level for level in levels if level is not None], options)
        return True

    def by_prices(self) -> None:
        """Finds a first answer: each table takes the level with the lowest sum of loss and price of
        its bytes, at the lowest price at which the levels fit."""
        if len(self._free) < 2:
            return
        low, high = -70.0, 10.0  # logarithms of prices
        for _ in range(_PRICES):
            middle = (low + high) / 2
            price = math.exp(middle)
            chosen = {
                table: min(
                    self._search.lossy(table),
                    key=lambda level: level.loss.value + price * (level.hbm + level.host),
                )
                for table in self._free
            }
            if self._try(chosen):
                high = middle
            else:
                low = middle

    def all_levels(self, chosen: Mapping[Table, Level] | None = None) -> None:
        """Tries all combinations of levels that may have less loss than the best so far."""
        chosen = dict(chosen or {})
        rest = self._free[len(chosen) :]
        if not rest:
            self._try(chosen)
            return
        known = sum(level.loss.value for level in chosen.values())
        after = sum(self._search.lossy(table)[0].loss.value for table in rest[1:])
        if len(rest) == 1:
            self._last(rest[0], chosen, known)
            return
        for level in self._search.lossy(rest[0]):
            if not self._is_better(known + level.loss.value + after):
                break
            self.all_levels({**chosen, rest[0]: level})

    def _is_better(self, loss: float) -> bool:
        return loss <= self._search.most_loss and (self.best is None or loss < self.best.loss)

    def _last(self, table: Table, chosen: Mapping[Table, Level], known: float) -> None:
        """Finds the level of the last table: in each chain, the largest size that fits."""
        chains: dict[tuple[str, ...], list[Level]] = {}
        for level in self._search.lossy(table):
            chains.setdefault(level.chain, []).append(level)
        for chain in sorted(chains.values(), key=lambda levels: levels[0].loss.value):
            own = [level for level in chain if self._is_better(known + level.loss.value)]
            low, high = 0, len(own)  # the first that fits is in [low, high], high: none
            while low < high:
                middle = (low + high) // 2
                if self._try({**chosen, table: own[middle]}):
                    high = middle
                else:
                    low = middle + 1
