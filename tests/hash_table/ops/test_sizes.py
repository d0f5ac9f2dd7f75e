"""size, capacity and load_factor."""

import pytest

from tests.support.tables import distinct_ids, make


@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 100, 127, 128, 129, 1000, 4097])
def test_capacity_is_rounded_up_by_less_than_one_slot_a_bucket(device_type, capacity):
    table = make(device_type, capacity, dim=1)
    assert capacity <= table.capacity < capacity + -(-capacity // 64)


@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 100, 129, 1000])
def test_a_table_fills_to_its_capacity(device_type, capacity):
    table = make(device_type, capacity, dim=1)
    for ids in distinct_ids(20 * capacity, device_type).split(max(1, capacity // 4)):
        table.find_or_insert(ids)
        assert table.size <= table.capacity
    assert table.size == table.capacity
    assert table.load_factor == 1.0


def test_size_counts_ids_once(device_type):
    table = make(device_type, 400)
    ids = distinct_ids(100, device_type)
    assert table.size == 0
    assert table.load_factor == 0
    table.find_or_insert(ids[:60].repeat(3))
    assert table.size == 60
    table.find_or_insert(ids)
    assert table.size == 100
    assert table.load_factor == 100 / table.capacity
    table.find(distinct_ids(50, device_type))
    assert table.size == 100
