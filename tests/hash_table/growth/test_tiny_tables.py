"""Tables of a few slots, with every initial capacity."""

import pytest

from tests.support.geometry import geometry
from tests.support.tables import distinct_ids, make


@pytest.mark.parametrize("capacity", [1, 5, 64, 65, 128, 129, 200])
def test_every_initial_capacity(device_type, capacity):
    for initial in {1, 2, 3, capacity // 3, capacity // 2, capacity - 1, capacity} - {0}:
        if initial > capacity:
            continue
        table = make(device_type, capacity, 2, initial_capacity=initial)
        first, last, slots = geometry(capacity, initial)
        assert table.num_slots == first * slots >= initial
        assert table.capacity == last * slots >= capacity
        assert table.capacity < capacity + last
        ids = distinct_ids(capacity, device_type)
        for part in ids.split(3):
            table.find_or_insert(part)
        assert table.size <= table.num_slots <= table.capacity
        if last <= 2:  # one or two buckets can fill all of their slots
            assert table.size == capacity
            assert table.contains(ids).all()


def test_geometry_without_growth_is_as_before():
    for capacity in (*range(1, 700), 12_345, 10**6 + 1):
        buckets = -(-capacity // 64)
        assert geometry(capacity, capacity)[1:] == (buckets, -(-capacity // buckets))
