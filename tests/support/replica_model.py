"""A Python model of the rules of docs/concepts/replicas.md, which shares no code with the package.

It reads from the tables what each held before a sync, and says what each must hold after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

Row = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a table keeps of an id; ``score`` as the policy makes it, without a sign for epochs."""

    row: Row
    state: Row
    step: int
    score: int


#: A replica by id.
Replica = dict[int, Kept]


class ReplicaModel:
    """Replicas of one table.

    Args:
        replicas: how many.
        policy: ``"lru"``, ``"lfu"``, ``"epoch_lru"``, ``"epoch_lfu"``, ``"customized"``, or
            ``"aged_lfu"``.
        initial_row: of an id.
        states: number of values of an optimizer's state.
        own_step: which of them counts the updates of the row; None for none.
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
        #: What each held after the last sync, and ids that it had lost in it.
        self.before: list[Replica] = [{} for _ in range(replicas)]
        self.lost: list[set[int]] = [set() for _ in range(replicas)]

    def merged(self, now: Sequence[Replica]) -> Replica:
        """What is agreed on for all ids that stay or come.

        Args:
            now: what each replica holds.
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
                    # Kept in all that have it.
                    result[id_] = next(own[id_] for own in now if id_ in own)
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
            result[id_] = Kept(
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
            own = scores[r] % low
            base = old.get(r, 0)
            count += own - base if own >= base else own
        if self.policy == "epoch_lfu":
            return max(scores.values()) // low * low + min(count, low - 1)
        return min(count, low - 1)

    def synced(self, now: Sequence[Replica], after: Sequence[Replica], agreed: Replica) -> None:
        """Notes what the replicas hold after a sync.

        Args:
            now: before it.
            after: after it.
            agreed: what :meth:`merged` gave.
        """
        anywhere = self.anywhere(now)
        for r, own in enumerate(after):
            wanted = set(agreed) & (anywhere | set(now[r]))
            self.before[r] = dict(own)
            self.lost[r] = wanted - set(own)
            self.touched[r] = set()

    def anywhere(self, now: Sequence[Replica]) -> set[int]:
        """Ids that are touched in some replica."""
        return set().union(*(own & set(held) for own, held in zip(self.touched, now, strict=True)))
