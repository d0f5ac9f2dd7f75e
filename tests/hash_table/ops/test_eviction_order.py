"""A CPU's calls agree, slot by slot, with a Python model that inserts ids one by one.

If a call misses at least as many ids as the table has buckets, it stores which entry leaves each
bucket next; otherwise it searches each time. Batches are of both kinds.
"""

from collections.abc import Sequence

import pytest
import torch

from tests.support.hashing import buckets_of
from torchrec_hkv.hash_table import HashTable

REFUSED = -1


class Model:
    """A table of full-width buckets, as in docs/concepts/hash_table.md."""

    def __init__(self, policy: str, buckets: int, slots: int) -> None:
        self.policy, self.buckets, self.slots = policy, buckets, slots
        self.now = 0
        self.ids: list[int | None] = [None] * (buckets * slots)
        self.ranks = [(0, 0)] * (buckets * slots)  # score, last step
        self.where: dict[int, int] = {}

    def call(self, ids: Sequence[int], given: Sequence[int]) -> list[int]:
        """Slots of a call's ids."""
        self.now += 1
        missing = [id_ not in self.where for id_ in ids]
        for id_, score, misses in zip(ids, given, missing, strict=True):
            if not misses:
                self._touch(id_, score)
        for id_, score, misses in zip(ids, given, missing, strict=True):
            if misses:
                self._touch(id_, score) if id_ in self.where else self._place(id_, score)
        return [self.where.get(id_, REFUSED) for id_ in ids]

    def _touch(self, id_: int, given: int) -> None:
        slot = self.where[id_]
        score = {"lru": self.now, "lfu": self.ranks[slot][0] + given, "customized": given}
        self.ranks[slot] = (score[self.policy], self.now)

    def _free(self, bucket: int) -> list[int]:
        begin = bucket * self.slots
        return [at for at in range(begin, begin + self.slots) if self.ids[at] is None]

    def _place(self, id_: int, given: int) -> None:
        first, second = buckets_of(id_, self.buckets)
        score = self.now if self.policy == "lru" else given
        free, other = self._free(first), self._free(second)
        if free and (len(free) > self.slots // 4 or len(free) >= len(other)):
            slot = free[0]
        elif other:
            slot = other[0]
        else:
            begins = dict.fromkeys((first * self.slots, second * self.slots))
            both = [at for begin in begins for at in range(begin, begin + self.slots)]
            may_go = [at for at in both if self.ranks[at][1] < self.now]
            if not may_go:
                return
            slot = min(may_go, key=self.ranks.__getitem__)  # the first one of equal rank
            if score < self.ranks[slot][0]:
                return
            del self.where[self.ids[slot]]
        self.ids[slot], self.ranks[slot], self.where[id_] = id_, (score, self.now), slot


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("policy", ["lru", "lfu", "customized"])
@pytest.mark.parametrize(("buckets", "slots"), [(1, 64), (2, 37), (3, 50), (11, 64), (40, 63)])
def test_as_a_model_of_single_ids(set_threads, policy, buckets, slots, threads):
    set_threads(threads)
    capacity = buckets * slots
    table = HashTable(1, capacity, eviction=policy)
    assert table.capacity == capacity
    model = Model(policy, buckets, slots)
    generator = torch.Generator().manual_seed(capacity)

    def draw(maximum: int, n: int) -> torch.Tensor:
        return torch.randint(maximum, (n,), generator=generator)

    evictions = 0
    few = max(1, buckets // 3)
    for n in [capacity // 2, capacity, few, capacity, few, 3, capacity // 3, few, 2 * capacity]:
        ids = draw(3 * capacity, n) - capacity
        scores = None
        if policy == "customized":  # one score an id: the highest of several would decide
            ids = ids.unique()[torch.randperm(len(ids.unique()), generator=generator)]
            scores = draw(8, len(ids))
        given = [1] * len(ids) if scores is None else scores.tolist()
        slots_of, _ = table.find_or_insert_slots(ids, scores)
        assert slots_of.tolist() == model.call(ids.tolist(), given)
        evictions = table.counters()["evicted"]
    assert evictions > 0
    assert table.size == len(model.where)
