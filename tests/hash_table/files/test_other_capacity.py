"""A load into another capacity inserts the entries again, and drops those with the lowest
scores."""

import pytest
import torch

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.saved_tables import assert_refused, buckets_of, entries, filled, like
from tests.support.table_model import POLICIES
from torchrec_hkv.hash_table import AgedLFU


def rank(entry, policy, table):
    _, step, score, _ = entry
    if isinstance(policy, AgedLFU):
        model = AgedLFUModel(policy.c)
        model.lookups, model.steps, _ = table.group.measured_aging(0)
        model.set_half_life(table.capacity)
        return (model.rank(score, step), step)
    return (step, step) if policy == "lru" else (score, step)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1100, 1500, 50_000])
def test_a_larger_table_takes_all(device_type, tmp_path, policy, capacity):
    table = filled(device_type, 3000, 1000, eviction=policy, state_dim=2)
    table.save(tmp_path)
    loaded = like(table, capacity=capacity)
    assert loaded.load(tmp_path) == 0
    assert entries(loaded) == entries(table)


def test_a_smaller_table_that_has_room_takes_all(device_type, tmp_path):
    table = filled(device_type, 500, 10_000)
    table.save(tmp_path)
    loaded = like(table, capacity=600)
    assert loaded.load(tmp_path) == 0
    assert entries(loaded) == entries(table)


def test_too_small_a_table_is_refused(device_type, tmp_path):
    table = filled(device_type, 500, 700)
    table.save(tmp_path)
    smaller = filled(device_type, 100, 300)
    caught = assert_refused(lambda t: t.load(tmp_path), smaller, "holds 500 entries")
    assert str(smaller.capacity) in str(caught.value)


def test_a_table_that_would_be_too_full_is_refused(device_type, tmp_path):
    table = filled(device_type, 500, 700)
    table.save(tmp_path)
    assert_refused(lambda t: t.load(tmp_path), filled(device_type, 9, 510), "sure to fit only")


@pytest.mark.slow
@pytest.mark.parametrize("batch_bytes", [500, 20_000, 64 << 20])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_lost_ranks_lowest(device_type, tmp_path, policy, batch_bytes):
    table = filled(device_type, 4000, 3000, eviction=policy, state_dim=1)
    table.save(tmp_path)
    smaller = like(table, capacity=1000)
    lost = smaller.load(tmp_path, allow_loss=True, batch_bytes=batch_bytes)
    before, after = entries(table), entries(smaller)
    assert lost == len(before) - len(after)
    assert smaller.size == smaller.capacity
    assert all(after[id_] == before[id_] for id_ in after)
    # A dropped id ranks below all entries of both its buckets.
    buckets = -(-1000 // 64)
    bucket_slots = smaller.capacity // buckets
    ids = list(after)
    slots = smaller.find_slots(torch.tensor(ids, device=device_type)).tolist()
    lowest = {}
    for id_, slot in zip(ids, slots, strict=True):
        bucket = slot // bucket_slots
        assert bucket in buckets_of(id_, buckets)
        own = rank(after[id_], policy, smaller)
        lowest[bucket] = min(own, lowest.get(bucket, own))
    for id_ in before.keys() - after.keys():
        own = rank(before[id_], policy, smaller)
        assert all(own <= lowest[bucket] for bucket in buckets_of(id_, buckets))
    # Few of the highest ranks are missing. Up to a load of .9, one of two buckets nearly always has
    # a free slot.
    ranked = sorted(before, key=lambda id_: rank(before[id_], policy, smaller), reverse=True)
    best = ranked[: int(0.9 * smaller.capacity)]
    last = rank(before[best[-1]], policy, smaller)
    missing = [
        id_ for id_ in best if id_ not in after and rank(before[id_], policy, smaller) > last
    ]
    assert len(missing) <= 0.02 * smaller.capacity


@pytest.mark.parametrize("policy", POLICIES)
def test_two_buckets_keep_exactly_the_highest(device_type, tmp_path, policy):
    table = filled(device_type, 900, 1000, eviction=policy)
    table.save(tmp_path)
    smaller = like(table, capacity=100)
    assert smaller.load(tmp_path, allow_loss=True, batch_bytes=3000) == 900 - smaller.capacity
    before, after = entries(table), entries(smaller)
    kept = sorted(rank(entry, policy, smaller) for entry in after.values())
    best = sorted(rank(entry, policy, smaller) for entry in before.values())[-smaller.capacity :]
    assert kept == best


def test_allow_loss_where_nothing_is_lost(device_type, tmp_path):
    table = filled(device_type)
    table.save(tmp_path)
    loaded = like(table, capacity=5000)
    assert loaded.load(tmp_path, allow_loss=True) == 0
    assert entries(loaded) == entries(table)
