"""A full table loads without loss: every entry returns to its own slot."""

import pytest

from tests.support.saved_tables import assert_same, filled, like, snapshot


@pytest.mark.parametrize("capacity", [1, 5, 64, 65, 1000, 20_000])
def test_nothing_is_lost(device_type, tmp_path, capacity):
    table = filled(device_type, 3 * capacity + 100, capacity, eviction="lfu", state_dim=1)
    assert table.size == table.capacity
    table.save(tmp_path, batch_bytes=1 << 16)
    loaded = like(table)
    assert loaded.load(tmp_path, batch_bytes=50_000) == 0
    assert loaded.size == table.capacity
    assert_same(snapshot(table), snapshot(loaded))
