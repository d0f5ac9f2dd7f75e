"""Half-lives up to the longest: a CPU's table agrees with a model in each slot after each call."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bucket_model import BucketModel
from torchrec_hkv.hash_table import AgedLFU, HashTable

#: In steps. 65,536 needs 33 bits with its fraction; 2^26 is the maximum.
HALF_LIVES = [0, 1, 150, 65_535, 65_536, 65_537, 10**6, 2**26 - 1, 2**26, 10**9]
#: Counts that one pass ranks, and larger ones.
COUNTS = [0, 1, 1, 1, 2, 3, 6, 7, 8, 14, 15, 16, 17, 126, 127, 128, 129, 255, 256, 2**40, 2**63 - 1]
#: Counts of whole buckets whose high bits are in separate arrays: few and many, equal and not.
HIGH_COUNTS = [
    [200],
    [128, 129, 130],
    [200, 255, 256, 300, 1000, 5000],
    [100, 127, 128, 150],
    [2**22, 2**22 + 1, 2**23 - 32769, 2**23 - 32768, 2**23 - 1, 2**23, 2**24 + 1],
    [2**40, 2**40 + 2**20, 2**62],
]
LAST_STEP = 2**32 - 1000


class Compared:
    """A table and its model, called with equally many ids each time.

    Args:
        half_life: steps.
        capacity: of the table.
        ids: of a call.
        seed: of everything random.
    """

    def __init__(self, half_life: float, capacity: int, ids: int, seed: int) -> None:
        c = half_life * ids / capacity
        self.model = BucketModel(capacity, c)
        self.table = HashTable(1, capacity, eviction=AgedLFU(c))
        assert self.table.capacity == self.model.num_slots
        self.half_life, self.ids, self.random = half_life, ids, random.Random(seed)

    def pass_time(self) -> None:
        """Passes a fraction of a half-life, or several."""
        share = self.random.choice([0, 0, 0.01, 0.3, 0.999, 1, 1.001, 2.3])
        gap = min(int(share * self.half_life), 2**26)
        if gap > 0:
            self.model.set_clock(min(self.model.clock + gap, LAST_STEP))
            self.table.group.set_clock(self.model.clock)

    def call(self, counts: list[int]) -> None:
        """Looks up ids from twice as many as the table holds."""
        ids = self.random.sample(range(2 * self.model.num_slots + self.ids), self.ids)
        given = [self.random.choice(counts) for _ in ids]
        self.table.find_or_insert(torch.tensor(ids), torch.tensor(given))
        slots = self.model.call(ids, given)
        assert self.table.find_slots(torch.tensor(ids)).tolist() == slots

    def check(self, must_evict: bool = True) -> None:
        """All entries are equal, and so is the number of evictions."""
        state = self.table.group.export_table(0)
        slots = state.occupied.nonzero().flatten()
        columns = (state.ids, state.scores, state.last_steps.long() % 2**32)
        entries = zip(*(column[slots].tolist() for column in columns), strict=True)
        assert dict(zip(slots.tolist(), entries, strict=True)) == self.model.entries()
        counters = self.table.counters()
        assert counters["evicted"] == self.model.evicted
        assert counters["evicted"] > 0 or not must_evict
        assert counters["refused"] == self.model.refused


@pytest.mark.parametrize("half_life", HALF_LIVES)
@pytest.mark.parametrize("capacity", [1, 7, 8, 15, 16, 17, 33, 48, 49, 61, 64])
def test_one_bucket(half_life, capacity):
    compared = Compared(half_life, capacity, 1, seed=capacity)
    for _ in range(4 * capacity + 60):
        compared.pass_time()
        compared.call(COUNTS)
    compared.check()


@pytest.mark.parametrize("half_life", HALF_LIVES)
@pytest.mark.parametrize(("capacity", "ids"), [(300, 30), (4000, 300)])
@pytest.mark.parametrize("threads", [1, 2])
def test_many_buckets(set_threads, half_life, capacity, ids, threads):
    set_threads(threads)
    compared = Compared(half_life, capacity, ids, seed=threads)
    for turn in range(3 * capacity // ids):
        compared.pass_time()
        # Small counts, as in most tables: many entries of a bucket have equal ranks.
        compared.call(COUNTS if turn % 4 == 0 else COUNTS[:8])
    compared.check()


@pytest.mark.parametrize("half_life", HALF_LIVES)
@pytest.mark.parametrize("counts", HIGH_COUNTS, ids=lambda counts: str(counts[0]))
@pytest.mark.parametrize(("capacity", "ids"), [(5, 1), (23, 1), (61, 1), (64, 2), (1000, 80)])
def test_high_counts(half_life, counts, capacity, ids):
    compared = Compared(half_life, capacity, ids, seed=capacity)
    for _ in range(3 * capacity // ids + 40):
        compared.pass_time()
        compared.call(counts)
    compared.check()


@settings(max_examples=60, deadline=None)
@given(
    half_life=st.one_of(
        st.sampled_from(HALF_LIVES),
        st.floats(0, 2**27),
        st.floats(0, 27).map(lambda exponent: 2**exponent),
    ),
    capacity=st.one_of(st.integers(1, 64), st.integers(65, 400)),
    ids=st.integers(1, 12),
    start=st.sampled_from([0, 2**16, 2**23 - 20, 2**23, 2**31 - 50, LAST_STEP - 50]),
    seed=st.integers(0, 2**32),
    counts=st.sampled_from([COUNTS, [1], [1, 2, 4], [126, 127, 128], *HIGH_COUNTS]),
)
def test_any(half_life, capacity, ids, start, seed, counts):
    compared = Compared(half_life, capacity, min(ids, capacity), seed)
    for turn in range(3 * capacity // compared.ids + 40):
        if turn == capacity // compared.ids:
            compared.model.set_clock(start)
            compared.table.group.set_clock(start)
        compared.pass_time()
        compared.call(counts)
    # A small table may refuse all new ids for their counts.
    compared.check(must_evict=False)


def test_steps_before_the_last_ones_leave_first():
    # The last steps of a 32-bit clock, with entries of the first ones.
    compared = Compared(100, 64, 1, seed=0)
    for id_ in range(64):
        compared.table.find_or_insert(torch.tensor([id_]), torch.tensor([3]))
        compared.model.call([id_], [3])
    compared.model.set_clock(LAST_STEP)
    compared.table.group.set_clock(LAST_STEP)
    for _ in range(100):
        compared.call([1])
    compared.check()
