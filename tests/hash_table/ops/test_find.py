"""find returns rows of present ids and initial rows of others, and changes nothing."""

import pytest
import torch

from tests.support.batches import INT64_MAX, INT64_MIN
from tests.support.table_model import POLICIES
from tests.support.tables import (
    constant_scores,
    contents,
    distinct_ids,
    expected_initial_rows,
    make,
    random_rows,
)


def test_rows_of_what_is_there(device_type):
    table = make(device_type, 2000, dim=7)
    ids = distinct_ids(1501, device_type)
    rows = random_rows(table, 1501)
    table.insert_or_assign(ids, rows)
    order = torch.randint(0, 1501, (4003,), device=device_type)
    found_rows, found = table.find(ids[order])
    assert found.dtype == torch.bool
    assert found.all()
    assert torch.equal(found_rows, rows[order])


def test_initial_rows_of_what_is_not(device_type):
    table = make(device_type, 200, dim=7)
    ids = distinct_ids(150, device_type)
    rows = random_rows(table, 50)
    table.insert_or_assign(ids[:50], rows)
    found_rows, found = table.find(ids)
    assert found.tolist() == [True] * 50 + [False] * 100
    assert torch.equal(found_rows[:50], rows)
    assert torch.equal(found_rows[50:], expected_initial_rows(table, ids[50:]))


@pytest.mark.parametrize("policy", POLICIES)
def test_changes_nothing(device_type, policy):
    table = make(device_type, 64, eviction=policy)
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids[:40], constant_scores(table, 40))
    table.find_or_insert(ids[40:60], constant_scores(table, 20))
    before = contents(table)
    counters = table.counters()
    for _ in range(3):
        table.find(ids)
        table.find_slots(ids)
        table.find_missing(ids)
        table.contains(ids)
    assert contents(table) == before
    assert table.counters() == counters
    # Ages did not change either: the call before the last touched 40 ids, the last one 20.
    assert table.erase_if(older_than=1) == 0
    assert table.erase_if(older_than=0) == 40


def test_slots(device_type):
    table = make(device_type, 300)
    ids = distinct_ids(300, device_type)
    slots, _ = table.find_or_insert_slots(ids[:200])
    table.find_or_insert(ids[200:280])
    again = table.find_slots(ids)
    assert torch.equal(again[:200], slots)
    there = again[:280]
    assert len(there.unique()) == 280
    assert there.min() >= 0
    assert there.max() < table.capacity
    assert (again[280:] == -1).all()


def test_every_int64_is_an_id(device_type):
    ids = [INT64_MIN, INT64_MIN + 1, -3, -2, -1, 0, 1, 2, 2**31, 2**32, INT64_MAX - 1, INT64_MAX]
    for inserted in (ids[::2], ids[1::2], ids):
        table = make(device_type)
        rows = random_rows(table, len(inserted))
        table.insert_or_assign(torch.tensor(inserted, device=device_type), rows)
        _, found = table.find(torch.tensor(ids, device=device_type))
        assert found.tolist() == [id_ in inserted for id_ in ids]
        assert torch.equal(table.find(torch.tensor(inserted, device=device_type))[0], rows)


def test_an_empty_table_and_an_empty_call(device_type):
    table = make(device_type)
    ids = distinct_ids(10, device_type)
    rows, found = table.find(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    rows, found = table.find(ids[:0])
    assert rows.shape == (0, 4)
    assert found.shape == (0,)
