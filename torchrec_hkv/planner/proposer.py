"""Proposes plans in the order of their loss: first plans without loss, from other proposers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardingOption,
    Topology,
)


class GreedyProposer(Proposer):
    """Makes the proposals of TorchRec's ``GreedyProposer`` in the same order, but each in
    logarithmic time in the number of tables.

    The first proposal has the fastest option of each table. Each further proposal replaces the
    option that takes the most memory by the next slower option of its table.
    """

    def __init__(self, use_depth: bool = True) -> None:
        """
        Args:
            use_depth: whether the time of an option is the largest time of its shards rather than
                their sum.
        """
        self._use_depth = use_depth
        self._by_table: list[list[ShardingOption]] = []
        self._current: list[ShardingOption] | None = None
        self._next: list[int] = []
        self._largest: list[tuple[tuple[int, int, int, int], int]] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Implements TorchRec's hook: takes the options of all tables."""
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        self._by_table = [sorted(options, key=self._time) for options in by_table.values()]
        self._current = [options[0] for options in self._by_table] or None
        self._next = [1] * len(self._by_table)
        self._largest = []
        for index in range(len(self._by_table)):
            self._push(index)

    def propose(self) -> list[ShardingOption] | None:
        """Implements TorchRec's hook: the current plan; None after the last."""
        return None if self._current is None else list(self._current)

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Implements TorchRec's hook: goes on to the next plan, whatever the rating."""
        if self._current is None or not self._largest:
            self._current = None
            return
        _, index = heapq.heappop(self._largest)
        self._current[index] = self._by_table[index][self._next[index]]
        self._next[index] += 1
        self._push(index)

    def _push(self, index: int) -> None:
        """Lists a table's current option, if there is a slower one."""
        options, following = self._by_table[index], self._next[index]
        if following == len(options):
            return
        stored = [shard.storage for shard in options[following - 1].shards if shard.storage]
        hbm, host = [each.hbm for each in stored], [each.ddr for each in stored]
        memory = (max(hbm), sum(hbm), max(host), sum(host))
        if any(memory):
            heapq.heappush(self._largest, ((-memory[0], -memory[1], -memory[2], -memory[3]), index))

    def _time(self, option: ShardingOption) -> float:
        times = [shard.perf.total for shard in option.shards if shard.perf is not None]
        return max(times) if self._use_depth else sum(times)


def default_proposers() -> list[Proposer]:
    """TorchRec's proposers, with this module's :class:`GreedyProposer`."""
    return [
        GridSearchProposer(),
        GreedyProposer(),
        GreedyProposer(use_depth=False),
        UniformProposer(),
    ]


class LossOrderedProposer(Proposer):
    """Proposes plans without loss. If none is good enough, proposes plans that a search over all
    options finds."""

    def __init__(
        self,
        proposers: Sequence[Proposer] | None,
        without_loss: Callable[[list[ShardingOption]], list[ShardingOption]],
        fastest: Callable[[list[ShardingOption]], list[list[ShardingOption]] | None],
        search: Callable[[list[ShardingOption], float | None], list[list[ShardingOption]]],
    ) -> None:
        """
        Args:
            proposers: proposers for plans without loss; None for the best plan of ``fastest``.
            without_loss: returns the options without loss; empty if a table has none.
            fastest: returns the best plans of options without loss. If it returns None, because it
                can't rate plans, :func:`default_proposers` are used.
            search: returns further plans, given all options and the best rating so far (None if
                nothing fits).
        """
        self._custom_proposers = proposers
        self._without_loss, self._fastest, self._search = without_loss, fastest, search
        self._proposers: list[Proposer] = []
        self._space: list[ShardingOption] = []
        self._waiting: Iterator[list[ShardingOption]] | None = None
        self._current: list[ShardingOption] | None = None
        self._index, self._best = 0, None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Implements TorchRec's hook: takes the options of all tables."""
        self._space, self._waiting, self._best, self._index = search_space, None, None, 0
        lossless = self._without_loss(search_space)
        self._proposers = self._proposers_of(lossless) if lossless else []
        for proposer in self._proposers:
            proposer.load(search_space=lossless, enumerator=enumerator)

    def _proposers_of(self, lossless: list[ShardingOption]) -> list[Proposer]:
        if self._custom_proposers is not None:
            return list(self._custom_proposers)
        found = self._fastest(lossless)
        return default_proposers() if found is None else [_Fixed(found)]

    def propose(self) -> list[ShardingOption] | None:
        """Implements TorchRec's hook: the next plan to rate; None after the last."""
        while self._index < len(self._proposers):
            proposal = self._proposers[self._index].propose()
            if proposal:
                return proposal
            self._index += 1
        if self._waiting is None:
            self._waiting = iter(self._search(self._space, self._best))
            self._current = next(self._waiting, None)
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Implements TorchRec's hook: the rating of the last plan."""
        if partitionable and perf_rating is not None:
            self._best = perf_rating if self._best is None else min(self._best, perf_rating)
        if self._waiting is not None:
            self._current = next(self._waiting, None)
        elif self._index < len(self._proposers):
            self._proposers[self._index].feedback(
                partitionable=partitionable,
                plan=plan,
                perf_rating=perf_rating,
                storage_constraint=storage_constraint,
            )


class _Fixed(Proposer):
    """Proposes given plans, or, if there are none, the fastest option of each table: if no plan
    fits, TorchRec's error message describes a plan."""

    def __init__(self, plans: Sequence[list[ShardingOption]]) -> None:
        self._plans = list(plans)

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Implements TorchRec's hook."""
        if not self._plans:
            greedy = GreedyProposer()
            greedy.load(search_space)
            first = greedy.propose()
            self._plans = [] if first is None else [first]

    def propose(self) -> list[ShardingOption] | None:
        """Implements TorchRec's hook: the first plan that is left."""
        return self._plans[0] if self._plans else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Implements TorchRec's hook: goes on to the next plan."""
        self._plans = self._plans[1:]
