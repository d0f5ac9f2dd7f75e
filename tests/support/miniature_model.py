"""Miniatures of a table in Python: lists of dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.hashing import mix64

CS = (0.0, 1.0, 2.0, 4.0, 16.0)
TOLERATED_PERCENT = 2
UINT32_MAX = 2**32 - 1

Set = dict[int, tuple[int, int]]  # by tag: count and last step


class MiniaturesModel:
    """Models the miniatures of a table and their choice of c.

    Args:
        slots: number of slots of the table.
        first_c: the value of c before the first choice.
    """

    def __init__(self, slots: int, first_c: float = 2.0) -> None:
        minimum = 1 if slots < 1024 else 4
        self.sets = min(max(slots // 2048, minimum), 64)
        self.ways = min(slots, 64)
        size = self.sets * self.ways
        self.sampled = 2**32 if size >= slots else (size << 20) // slots << 12
        self.slots = slots
        self.c = first_c
        self.entries: list[list[Set]] = [[{} for _ in range(self.sets)] for _ in CS]
        self.hits = [0] * len(CS)
        self.recent = [0] * len(CS)
        self.lookups = self.recent_lookups = self.evicted = self.chosen_at = 0

    def begin_call(self, counted: int) -> None:
        """Begins a call; chooses c if it is time to."""
        if counted - self.chosen_at < self.slots:
            return
        self.chosen_at = counted
        self.recent_lookups += self.lookups - self.recent_lookups // 3
        self.recent = [
            old + new - old // 3 for old, new in zip(self.recent, self.hits, strict=True)
        ]
        self.lookups, self.hits = 0, [0] * len(CS)
        if self.evicted < self.sets * self.ways:
            return
        minimum = max(self.recent) * (100 - TOLERATED_PERCENT)
        self.c = max(c for c, hits in zip(CS, self.recent, strict=True) if hits * 100 >= minimum)

    def update(
        self, ids: Sequence[int], given: Sequence[int], now: int, aged: AgedLFUModel
    ) -> None:
        """Processes a call with these ids and counts, after its half-life was set."""
        of_set: dict[int, list[tuple[int, int]]] = {}
        for id_, count in zip(ids, given, strict=True):
            mixed = mix64(id_ % 2**64 ^ 0xBB67AE8584CAA73B)
            if mixed >> 32 >= self.sampled:
                continue
            low = mixed % 2**32
            of_set.setdefault(low * self.sets >> 32, []).append((low or 1, min(count, UINT32_MAX)))
            self.lookups += 1
        for set_, set_ids in of_set.items():
            for k, c in enumerate(CS):
                ranks = AgedLFUModel(c)
                ranks.half_life = aged.half_life_of(c)
                self._update(k, self.entries[k][set_], set_ids, now, ranks)

    def _update(
        self,
        k: int,
        entries: Set,
        set_ids: Sequence[tuple[int, int]],
        now: int,
        ranks: AgedLFUModel,
    ) -> None:
        missing: Counter[int] = Counter()
        for tag, count in set_ids:
            if tag in entries:
                entries[tag] = (min(entries[tag][0] + count, UINT32_MAX), now)
                self.hits[k] += 1
            else:
                missing[tag] += count
        for tag in sorted(missing):
            if len(entries) == self.ways:
                left = [
                    (ranks.rank(count, last), last, other)
                    for other, (count, last) in entries.items()
                    if last != now and ranks.rank(count, last) <= ranks.rank_of_new(now)
                ]
                if not left:
                    continue
                del entries[min(left)[2]]
                self.evicted += k == 0
            entries[tag] = (min(missing[tag], UINT32_MAX), now)

    @property
    def tally(self) -> list[int]:
        """Returns the tally in the format of a group."""
        return [
            *self.hits,
            self.lookups,
            *self.recent,
            self.recent_lookups,
            self.evicted,
            self.chosen_at,
        ]
