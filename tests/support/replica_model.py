"""A Python model of the rules of docs/concepts/replicas.md, which shares no code with the package.

It reads the contents of tables before a sync, and computes their contents after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

Row = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaEntry:
    """A table's entry of an id. ``score`` is the policy's score, without a sign for epochs."""

    row: Row
    state: Row
    step: int
    score: int


#: A replica by id.
Replica = dict[int, ReplicaEntry]


class ReplicaModel:
    """Replicas of one table.

    Args:
        replicas: number of replicas.
        policy: ``"lru"``, ``"lfu"``, ``"epoch_lru"``, ``"epoch_lfu"``, ``"customized"``, or
            ``"aged_lfu"``.
        initial_row: returns the initial row of an id.
        states: number of values of an optimizer's state.
        own_step: index of the state value that counts the row's updates, or None.
    """

    def __init__(
        self,
        replicas: int,
        policy: str,
        initial_row: Callable[[int], Row],
        states: int,
        own_step: int | None,
    ) -> None:
        self.policy, self.initial_row = policy, initial_row
        self.states, self.own_step = states, own_step
        self.touched: list[set[int]] = [set() for _ in range(replicas)]
        #: The contents of each replica after the last sync, and the ids that it lost in it.
        self.before: list[Replica] = [{} for _ in range(replicas)]
        self.lost: list[set[int]] = [set() for _ in range(replicas)]

    def merged(self, now: Sequence[Replica]) -> Replica:
        """Returns the merged entries of all ids that stay or arrive.

        Args:
            now: contents of each replica.
        """
        replicas = range(len(now))
        had = [set(self.before[r]) | self.lost[r] for r in replicas]
        touched = [self.touched[r] & set(now[r]) for r in replicas]
        left = set().union(*(had[r] - set(now[r]) for r in replicas))
        anywhere = self.anywhere(now)
        result: Replica = {}
        for id_ in set().union(*now):
            if id_ not in anywhere:
                if id_ not in left:
                    # Kept in all replicas that have it.
                    result[id_] = next(replica[id_] for replica in now if id_ in replica)
                continue
            holders = [r for r in replicas if id_ in now[r]]
            values = [(*now[r][id_].row, *now[r][id_].state) for r in holders]
            if not any(id_ in had[r] for r in replicas):
                blank = (*self.initial_row(id_), *[0.0] * self.states)
                values += [blank] * (len(now) - len(holders))
            mean = [sum(column) / len(values) for column in zip(*values, strict=True)]
            dim = len(mean) - self.states
            row, state = mean[:dim], mean[dim:]
            if self.own_step is not None:
                state[self.own_step] = max(now[r][id_].state[self.own_step] for r in holders)
            result[id_] = ReplicaEntry(
                tuple(row),
                tuple(state),
                max(now[r][id_].step for r in holders),
                self._score(id_, now, holders, [r for r in holders if id_ in touched[r]]),
            )
        return result

    def _score(
        self, id_: int, now: Sequence[Replica], holders: list[int], touched: list[int]
    ) -> int:
        scores = {r: now[r][id_].score for r in holders}
        if self.policy == "lru":
            return 0
        if self.policy == "epoch_lru":
            return max(scores.values())
        if self.policy == "customized":
            return max(scores[r] for r in touched)
        low = 2**32 if self.policy == "epoch_lfu" else 2**63
        old = {r: self.before[r][id_].score % low for r in holders if id_ in self.before[r]}
        count = max([0, *old.values()])
        for r in touched:
            lookups = scores[r] % low
            base = old.get(r, 0)
            count += lookups - base if lookups >= base else lookups
        if self.policy == "epoch_lfu":
            return max(scores.values()) // low * low + min(count, low - 1)
        return min(count, low - 1)

    def synced(self, now: Sequence[Replica], after: Sequence[Replica], agreed: Replica) -> None:
        """Stores the contents of the replicas after a sync.

        Args:
            now: contents before the sync.
            after: contents after the sync.
            agreed: the result of :meth:`merged`.
        """
        anywhere = self.anywhere(now)
        for r, replica in enumerate(after):
            expected = set(agreed) & (anywhere | set(now[r]))
            self.before[r] = dict(replica)
            self.lost[r] = expected - set(replica)
            self.touched[r] = set()

    def anywhere(self, now: Sequence[Replica]) -> set[int]:
        """Returns ids that are touched in a replica."""
        return set().union(
            *(touched & set(replica) for touched, replica in zip(self.touched, now, strict=True))
        )
