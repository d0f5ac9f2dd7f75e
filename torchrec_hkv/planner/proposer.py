"""Proposes plans in the order of their loss: first those of TorchRec's proposers, without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchrec.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardingOption,
    Topology,
)


class LossOrderedProposer(Proposer):
    """Runs other proposers on the options without loss, and then a search over all options if their
    plans are not good enough."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        without_loss: Callable[[list[ShardingOption]], list[ShardingOption]],
        search: Callable[[list[ShardingOption], float | None], list[list[ShardingOption]]],
    ) -> None:
        """
        Args:
            proposers: proposers for plans without loss.
            without_loss: returns the options without loss; empty if a table has none.
            search: returns further plans, given all options and the best rating so far (None if
                nothing fits).
        """
        self._proposers, self._without_loss, self._search = list(proposers), without_loss, search
        self._space: list[ShardingOption] = []
        self._waiting: Iterator[list[ShardingOption]] | None = None
        self._current: list[ShardingOption] | None = None
        self._index, self._best = 0, None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Implements TorchRec's hook: takes the options of all tables."""
        self._space, self._waiting, self._best = search_space, None, None
        whole = self._without_loss(search_space)
        self._index = 0 if whole else len(self._proposers)
        for proposer in self._proposers if whole else ():
            proposer.load(search_space=whole, enumerator=enumerator)

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
