"""Files of tables that have grown to different sizes."""

import pytest

from tests.support.geometry import geometry
from tests.support.saved_tables import (
    assert_refused,
    assert_same,
    entries,
    filled,
    like,
    snapshot,
)
from tests.support.tables import distinct_ids
from torchrec_hkv.hash_table import HashTable

CAPACITY, INITIAL = 8000, 500


def growing(device: str, n: int, **options) -> HashTable:
    return filled(device, n, CAPACITY, initial_capacity=INITIAL, state_dim=1, **options)


@pytest.mark.parametrize("n", [0, 100, 1500, 7000])
def test_slot_for_slot_into_a_table_that_can_grow_as_far(device_type, tmp_path, n):
    table = growing(device_type, n, eviction="lfu")
    table.save(tmp_path)
    fresh = like(table, initial_capacity=INITIAL)
    assert fresh.num_slots <= table.num_slots
    assert fresh.load(tmp_path) == 0
    assert fresh.num_slots == table.num_slots
    assert_same(snapshot(table), snapshot(fresh))
    made = HashTable.from_file(tmp_path, device=device_type)
    assert (made.num_slots, made.capacity) == (table.num_slots, table.capacity)
    assert_same(snapshot(table), snapshot(made))
    # Both tables continue to grow.
    ids = distinct_ids(500, device_type)
    for loaded in (fresh, made):
        loaded.find_or_insert(ids)
        assert loaded.contains(ids).all()
        assert loaded.size == n + 500


@pytest.mark.parametrize("initial", [None, 64, 3000])
@pytest.mark.parametrize("n", [100, 1500])
def test_into_other_geometries(device_type, tmp_path, initial, n):
    table = growing(device_type, n)
    table.save(tmp_path)
    other = like(table, initial_capacity=initial)
    assert other.load(tmp_path) == 0
    assert entries(other) == entries(table)
    # And the other way round.
    other.save(tmp_path)
    back = like(table, initial_capacity=INITIAL)
    assert back.load(tmp_path) == 0
    assert entries(back) == entries(table)
    assert back.counters()["evicted"] == 0


def test_a_table_that_has_grown_further(device_type, tmp_path):
    table = growing(device_type, 100)
    table.save(tmp_path)
    other = growing(device_type, 3000)
    slots = other.num_slots
    assert other.load(tmp_path) == 0
    assert other.num_slots == slots
    assert entries(other) == entries(table)


@pytest.mark.parametrize("n", [600, 2500])
def test_grows_as_entries_need_it(device_type, tmp_path, n):
    """The table grows as its entries need it, also from a file of another capacity."""
    table = filled(device_type, n, 3000)
    table.save(tmp_path)
    other = like(table, capacity=CAPACITY, initial_capacity=INITIAL)
    assert other.load(tmp_path) == 0
    assert entries(other) == entries(table)
    assert n <= other.num_slots - other.num_slots // 8 <= 4 * max(n, INITIAL)


def test_another_capacity_from_a_file(device_type, tmp_path):
    table = growing(device_type, 1500)
    table.save(tmp_path)
    loaded = HashTable.from_file(tmp_path, capacity=5000, device=device_type)
    assert loaded.num_slots == loaded.capacity >= 5000
    assert entries(loaded) == entries(table)
    loaded = HashTable.from_file(tmp_path, capacity=5000, initial_capacity=9, device=device_type)
    assert loaded.num_slots < loaded.capacity
    assert entries(loaded) == entries(table)
    loaded = HashTable.from_file(tmp_path, initial_capacity=CAPACITY, device=device_type)
    assert loaded.num_slots == loaded.capacity
    assert entries(loaded) == entries(table)


def test_room_is_that_of_the_full_capacity(device_type, tmp_path):
    table = filled(device_type, 700, 1000)
    table.save(tmp_path)
    small = like(table, capacity=500, initial_capacity=64)
    assert_refused(lambda t: t.load(tmp_path), small, "holds 700 entries")
    lost = small.load(tmp_path, allow_loss=True)
    assert small.num_slots == small.capacity == small.size == 700 - lost
    assert geometry(500, 64)[1] * geometry(500, 64)[2] == small.capacity
