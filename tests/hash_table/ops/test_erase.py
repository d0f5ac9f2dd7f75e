"""erase removes ids; an erased id that returns starts from its initial row."""

import torch

from tests.support.tables import (
    contents,
    distinct_ids,
    expected_initial_rows,
    make,
    random_rows,
    scores_of,
)


def test_erased_ids_are_gone_and_others_stay(device_type):
    table = make(device_type, 2000, dim=5)
    ids = distinct_ids(1501, device_type)
    rows = random_rows(table, 1001)
    table.insert_or_assign(ids[:1001], rows)
    slots = table.find_slots(ids[:1001])
    table.erase(ids[500:])  # 1001 to 1501 were never there
    assert table.size == 500
    assert table.contains(ids).tolist() == [True] * 500 + [False] * 1001
    assert torch.equal(table.find(ids[:500])[0], rows[:500])
    assert torch.equal(table.find_slots(ids[:500]), slots[:500])
    assert contents(table).keys() == set(ids[:500].tolist())


def test_then_insert_again(device_type):
    table = make(device_type, 300, dim=5, eviction="lfu", state_dim=1)
    ids = distinct_ids(200, device_type)
    for _ in range(3):
        table.insert_or_assign(ids, random_rows(table, 200))
    table.erase(ids[:100])
    rows, found = table.find_or_insert(ids)
    assert found.tolist() == [False] * 100 + [True] * 100
    assert torch.equal(rows[:100], expected_initial_rows(table, ids[:100]))
    scores = scores_of(table)
    assert [scores[id_] for id_ in ids.tolist()] == [1] * 100 + [4] * 100


def test_repeated_ids(device_type):
    table = make(device_type, 300)
    ids = distinct_ids(200, device_type)
    table.find_or_insert(ids)
    order = torch.randint(0, 100, (5000,), device=device_type)
    table.erase(ids[order])
    assert table.size == 200 - len(order.unique())
    table.erase(ids[order])
    assert table.size == 200 - len(order.unique())


def test_makes_room(device_type):
    """Inserts reuse the erased slots before they evict anything."""
    table = make(device_type, 64)
    ids = distinct_ids(96, device_type)
    table.find_or_insert(ids[:64])
    table.erase(ids[10:42])
    table.find_or_insert(ids[64:])
    assert contents(table).keys() == set(ids.tolist()) - set(ids[10:42].tolist())
    assert table.counters()["evicted"] == 0


def test_many_turns(device_type):
    """Erased ids leave no trace: a table serves any number of ids one after the other."""
    table = make(device_type, 1000)
    for ids in distinct_ids(20_000, device_type).split(500):
        slots, found = table.find_or_insert_slots(ids)
        assert (slots >= 0).all()
        assert not found.any()
        table.erase(ids)
        assert table.size == 0
    assert table.counters()["evicted"] == table.counters()["refused"] == 0


def test_everything_and_nothing(device_type):
    table = make(device_type, 300)
    ids = distinct_ids(200, device_type)
    table.erase(ids)
    table.find_or_insert(ids)
    table.erase(ids[:0])
    assert table.size == 200
    table.erase(ids)
    assert table.size == 0
    assert contents(table) == {}
