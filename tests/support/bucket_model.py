"""A table on a CPU under LFU with aging, slot by slot, in Python."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.geometry import geometry
from tests.support.hashing import buckets_of

Entry = tuple[int, int, int]  # id, count and last step


class BucketModel:
    """Models calls of ``HashTable.find_or_insert`` with distinct ids.

    Args:
        capacity: capacity of the table.
        c: parameter c of its policy.
    """

    def __init__(self, capacity: int, c: float) -> None:
        _, number, self.bucket_slots = geometry(capacity, capacity)
        self.buckets: list[list[Entry]] = [[] for _ in range(number)]
        self.aged = AgedLFUModel(c)
        self.clock = self.lookups = self.evicted = self.refused = 0

    @property
    def num_slots(self) -> int:
        """Returns the number of slots in all buckets."""
        return len(self.buckets) * self.bucket_slots

    def set_clock(self, clock: int) -> None:
        """Advances the clock; the skipped steps are not measured."""
        self.clock, self.aged.seen = clock, None

    def call(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Runs a call; returns the slots of the ids after it, or -1."""
        self.clock += 1
        self.aged.begin_call(self.clock, self.lookups, self.num_slots)
        self.lookups += len(ids)
        missing = [
            (id_, count)
            for id_, count in zip(ids, counts, strict=True)
            if not self._count_again(id_, count)
        ]
        for id_, count in missing:
            self._place(id_, count)
        return [self._slot(id_) for id_ in ids]

    def entries(self) -> dict[int, Entry]:
        """Returns the entries by slot."""
        return {
            b * self.bucket_slots + p: entry
            for b, bucket in enumerate(self.buckets)
            for p, entry in enumerate(bucket)
        }

    def _at(self, id_: int) -> tuple[int, int] | None:
        for b in buckets_of(id_, len(self.buckets)):
            for p, entry in enumerate(self.buckets[b]):
                if entry[0] == id_:
                    return b, p
        return None

    def _slot(self, id_: int) -> int:
        at = self._at(id_)
        return -1 if at is None else at[0] * self.bucket_slots + at[1]

    def _count_again(self, id_: int, count: int) -> bool:
        at = self._at(id_)
        if at is not None:
            old = self.buckets[at[0]][at[1]]
            self.buckets[at[0]][at[1]] = (id_, min(old[1] + count, 2**63 - 1), self.clock)
        return at is not None

    def _place(self, id_: int, count: int) -> None:
        new = (id_, count, self.clock)
        first, second = buckets_of(id_, len(self.buckets))
        free = [self.bucket_slots - len(self.buckets[b]) for b in (first, second)]
        if any(free):
            takes_first = free[0] > self.bucket_slots // 4 or free[0] >= free[1]
            self.buckets[first if free[0] and takes_first else second].append(new)
            return
        ranked = [
            (self.aged.rank(entry[1], entry[2]), entry[2], turn, p)
            for turn, b in enumerate((first, second))
            for p, entry in enumerate(self.buckets[b])
            if entry[2] < self.clock
        ]
        if not ranked or self.aged.rank(count, self.clock) < min(ranked)[0]:
            self.refused += 1
            return
        _, _, turn, p = min(ranked)
        self.buckets[(first, second)[turn]][p] = new
        self.evicted += 1
