"""LFU with aging: c decides which ids leave."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aged_lfu_model import log2_of_count
from tests.support.tables import distinct_ids, make, scores_of
from torchrec_hkv.hash_table import AgedLFU, HashTable


def test_log2_is_close_and_never_decreases():
    counts = [*range(1, 5000), *(2**k + d for k in range(13, 52) for d in (-1, 0, 1, 3 << k - 9))]
    logs = [log2_of_count(count) for count in counts]
    for count, log in zip(counts, logs, strict=True):
        assert abs(log / 65536 - math.log2(count)) < 0.009
    ordered = sorted(zip(counts, logs, strict=True))
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(ordered))
    assert [log2_of_count(2**k) for k in range(52)] == [k << 16 for k in range(52)]


def streams(seed: int, calls: int) -> list[torch.Tensor]:
    """Batches of skewed ids, of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 40, (calls,), generator=generator).tolist()
    return [(torch.rand(n, generator=generator) ** 4 * 4000).long() for n in sizes]


@settings(max_examples=20, deadline=None)
@given(c=st.sampled_from([0.0, math.inf]), seed=st.integers(0, 1000), capacity=st.integers(1, 300))
def test_the_ends_are_lru_and_lfu(c, seed, capacity):
    aged = HashTable(2, capacity, eviction=AgedLFU(c))
    other = HashTable(2, capacity, eviction="lfu" if c else "lru")
    for ids in streams(seed, 40):
        aged.find_or_insert(ids)
        other.find_or_insert(ids)
        assert torch.equal(aged.find_slots(ids), other.find_slots(ids))
    assert scores_of(aged).keys() == scores_of(other).keys()


@pytest.mark.parametrize(("c", "stays"), [(1.0, False), (3.0, True)])
def test_a_count_is_worth_half_after_a_half_life(device_type, c, stays):
    """16 old lookups weigh as much as one recent lookup after 4 half-lives."""
    table = make(device_type, 64, eviction=AgedLFU(c))
    ids = distinct_ids(2000, device_type)
    table.find_or_insert(ids[:1].repeat(16))
    # 8 capacities of ids that occur once: an age of 8 half-lives for c = 1, of 8 / 3 for c = 3.
    for part in ids[1 : 1 + 8 * 64].split(16):
        table.find_or_insert(part)
    assert table.contains(ids[:1]).item() == stays


def test_c_changes_on_the_way(device_type):
    table = make(device_type, 64, eviction=AgedLFU(math.inf))
    ids = distinct_ids(2000, device_type)
    table.find_or_insert(ids[:64].repeat(3))
    for part in ids[64:640].split(8):
        table.insert_or_assign(part, torch.zeros(8, table.dim, device=device_type))
    assert table.contains(ids[:64]).all(), "counts of 1 are refused under LFU"
    table.set_aging(0.0)
    assert table.eviction == AgedLFU(0.0)
    for part in ids[64:640].split(8):
        table.find_or_insert(part)
    assert not table.contains(ids[:64]).any()


@pytest.mark.parametrize("c", [-1.0, math.nan, "3", True, None])
def test_refuses_what_is_no_half_life(c):
    with pytest.raises(ValueError, match=r"c is .* but must be a number of at least 0"):
        AgedLFU(c)
    with pytest.raises(ValueError, match=r"c is .* but must be a number of at least 0"):
        HashTable(2, 64, eviction=AgedLFU()).set_aging(c)


def test_other_policies_have_no_half_life():
    with pytest.raises(ValueError, match="has no c to set"):
        HashTable(2, 64, eviction="lfu").set_aging(3.0)


def test_an_integer_c_is_the_same_policy():
    assert AgedLFU(3) == AgedLFU()
    assert hash(AgedLFU(3)) == hash(AgedLFU(3.0))
