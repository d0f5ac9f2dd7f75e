"""Tries levels of loss for the tables that lose something. All other tables keep full quality.

A selection of options of n tables with s shards on r ranks takes O(n + s * r) time, and O(s^2 / r)
more for each exchange of shards. For k tables that lose, with up to m levels each, the first answer
takes 24 selections, and each pass over single tables O(k * log(m)). A pass over pairs takes O(k^2 *
log(m)), without those that the memory of all ranks together rules out. For many tables the total
number of selections is bounded (:mod:`torchrec_hkv.planner.search`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.levels import LossLevel
from torchrec_hkv.planner.loss_bounds import LossBound, Table

if TYPE_CHECKING:
    from torchrec_hkv.planner.search import LeastLossSearch

#: Number of bisection steps for the price of a byte in the first answer.
_PRICES = 24
#: Losses that differ by less count as equal.
EQUAL = 1e-12


@dataclasses.dataclass(frozen=True)
class BestLevels:
    """Levels that fit, with options of theirs that do."""

    loss: float
    levels: list[LossLevel]
    options: list[ShardingOption]


class LevelSearch:
    """Tries the levels of some tables, with fixed levels for all others.

    Attributes:
        best: the best plan so far with less loss than the limit.
    """

    def __init__(
        self,
        search: LeastLossSearch,
        names: Sequence[Table],
        fixed: Mapping[Table, LossLevel | None],
        free: Sequence[Table],
        bound: LossBound,
        limit: float,
    ) -> None:
        self._search, self._names, self._fixed, self._free = search, names, fixed, free
        self._bound, self._limit = bound, limit
        self.best: BestLevels | None = None
        self._best_fitting: dict[Table, LossLevel] | None = (
            None  # the best levels so far, within bounds or not
        )
        self._tried: dict[tuple[int, ...], bool] = {}
        self._fixed_memory = memory_of(level for level in fixed.values() if level is not None)
        # Lower bounds on loss and price: of the fixed tables, and of the free tables from each
        # index on.
        used = sum(bound.size(level) for level in fixed.values() if level is not None)
        self._base = bound.price * (used - bound.capacity)
        costs = [bound.cheapest[table] for table in free]
        self._after = [*itertools.accumulate(reversed(costs), initial=0.0)][::-1]

    def _try(self, chosen: Mapping[Table, LossLevel]) -> bool:
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
        if loss <= self._search.max_loss and self._is_better(loss):
            self.best = BestLevels(loss, [level for level in levels if level is not None], options)
        if self._best_fitting is None or loss < _loss(self._best_fitting):
            self._best_fitting = dict(chosen)
        return True

    def try_smallest(self) -> bool:
        """Whether the smallest levels fit: of all levels, or of those whose largest shard takes at
        most a given part of a rank's memory."""
        size, memory = self._bound.size, self._search.rank_memory

        def of_part(part: float) -> Callable[[LossLevel], tuple[float, float]]:
            return lambda level: (max(level.shard, memory * part), size(level))

        return any(
            self._try({table: min(self._search.lossy(table), key=key) for table in self._free})
            for key in (of_part(1), of_part(0.5), of_part(0.125), of_part(0))
        )

    def search_by_price(self) -> None:
        """Finds a first answer: each table takes the level with the least sum of loss and price, at
        the lowest price at which the levels fit."""
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

    def improve_single_tables(self) -> None:
        """Gives unused memory to one table after the other, as long as the loss decreases."""
        if len(self._free) < 3 or self._best_fitting is None:
            return
        before = math.inf
        while _loss(self._best_fitting) < before - EQUAL:
            before = _loss(self._best_fitting)
            for table in sorted(self._free, key=lambda t: -self._best_fitting[t].loss.value):
                others = {
                    other: self._best_fitting[other] for other in self._free if other != table
                }
                self._search_last_table(
                    table, others, _loss(others), self._best_fitting[table].loss.value
                )

    def improve_pairs(self) -> None:
        """Gives one table its next smaller level, and the freed memory to another table, as long as
        the loss decreases."""
        before = math.inf
        while self._best_fitting is not None and _loss(self._best_fitting) < before - EQUAL:
            before = _loss(self._best_fitting)
            for lowered, raised in itertools.permutations(self._free, 2):
                if self._search.is_exhausted:
                    return
                current = self._best_fitting
                lower = self._next_smaller(lowered, current[lowered])
                if lower is None:
                    continue
                others = {**current, lowered: lower}
                del others[raised]
                loss_of_others = _loss(others)
                self._search_last_table(
                    raised, others, loss_of_others, _loss(current) - loss_of_others - EQUAL
                )

    def _next_smaller(self, table: Table, level: LossLevel) -> LossLevel | None:
        chain = [each for each in self._search.lossy(table) if each.chain == level.chain]
        place = chain.index(level) + 1
        return chain[place] if place < len(chain) else None

    def search_all(
        self, chosen: Mapping[Table, LossLevel] | None = None, cost: float = 0.0
    ) -> None:
        """Tries all combinations of levels that may have less loss than the best so far.

        Args:
            chosen: the levels of the first tables.
            cost: sum of their losses and prices.
        """
        chosen = dict(chosen or {})
        place = len(chosen)
        rest = self._free[place:]
        if not rest:
            self._try(chosen)
            return
        chosen_loss = _loss(chosen)
        if len(rest) == 1:
            self._search_last_table(rest[0], chosen, chosen_loss)
            return
        after = sum(self._search.lossy(table)[0].loss.value for table in rest[1:])
        price, size = self._bound.price, self._bound.size
        for level in self._search.lossy(rest[0]):
            loss = level.loss.value
            if not self._search.count_visited_level() or not self._is_better(
                chosen_loss + loss + after
            ):
                break
            then = cost + loss + price * size(level)
            if self._is_better(self._base + then + self._after[place + 1]):
                self.search_all({**chosen, rest[0]: level}, then)

    def _is_better(self, loss: float) -> bool:
        limit = self._limit if self.best is None else self.best.loss - EQUAL
        return loss < limit and loss <= self._search.max_loss + EQUAL

    def _search_last_table(
        self,
        table: Table,
        chosen: Mapping[Table, LossLevel],
        chosen_loss: float,
        maximum: float = math.inf,
    ) -> None:
        """Finds the level of the last table: in each chain, the largest size that fits.

        Args:
            table: the table.
            chosen: the levels of the other tables.
            chosen_loss: sum of their losses.
            maximum: only levels with less loss than this are tried.
        """
        chains: dict[tuple[str, ...], list[LossLevel]] = {}
        for level in self._search.lossy(table):
            if level.loss.value >= maximum:
                break
            chains.setdefault(level.chain, []).append(level)
        hbm, host, total = map(
            sum, zip(self._fixed_memory, memory_of(chosen.values()), strict=True)
        )
        for chain in sorted(chains.values(), key=lambda levels: levels[0].loss.value):
            if maximum == math.inf:
                candidates = [
                    level for level in chain if self._is_better(chosen_loss + level.loss.value)
                ]
            else:
                candidates = chain
            # Levels before `low` do not fit.
            low = _first(
                candidates,
                lambda level: self._search.has_memory(
                    hbm + level.hbm, host + level.host, total + level.total
                ),
            )
            _first(candidates, lambda level: self._try({**chosen, table: level}), low)


def memory_of(levels: Iterable[LossLevel]) -> tuple[int, int, int]:
    """The least HBM, host memory and memory in total that levels take."""
    hbm = host = total = 0
    for level in levels:
        hbm, host, total = hbm + level.hbm, host + level.host, total + level.total
    return hbm, host, total


def _first(levels: Sequence[LossLevel], fits: Callable[[LossLevel], bool], low: int = 0) -> int:
    """Bisection for the first level of a chain that fits; a chain begins with the largest level."""
    high = len(levels)
    while low < high:
        middle = (low + high) // 2
        if fits(levels[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _loss(chosen: Mapping[Table, LossLevel]) -> float:
    return sum(level.loss.value for level in chosen.values())
