"""After clear, a table behaves like a new one."""

import torch

from tests.support.tables import contents, distinct_ids, expected_initial_rows, make, random_rows


def test_nothing_stays(device_type):
    table = make(device_type, 300, eviction="lfu")
    ids = distinct_ids(200, device_type)
    table.insert_or_assign(ids, random_rows(table, 200))
    table.clear()
    assert table.size == 0
    assert table.load_factor == 0
    assert not table.contains(ids).any()
    assert contents(table) == {}
    assert table.erase_if(older_than=0) == 0


def test_then_insert_again(device_type):
    table = make(device_type, 64, eviction="lfu")
    ids = distinct_ids(64, device_type)
    for _ in range(3):
        table.insert_or_assign(ids, random_rows(table, 64))
    table.clear()
    rows, found = table.find_or_insert(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert {score for _, score, _ in contents(table).values()} == {1}
    assert table.size == 64
    assert table.counters()["evicted"] == 0


def test_an_empty_table(device_type):
    table = make(device_type)
    table.clear()
    assert table.size == 0
