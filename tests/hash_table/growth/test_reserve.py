"""reserve grows a table at once, so that later calls need not."""

import pytest
import torch

from tests.support.saved_tables import entries, filled
from tests.support.tables import distinct_ids, make


@pytest.mark.parametrize("rows", [1, 57, 100, 1000, 3000, 9999, 10_000])
def test_takes_so_many_rows_without_growing(device_type, rows):
    table = make(device_type, 10_000, 2, initial_capacity=100)
    table.reserve(rows)
    slots = table.num_slots
    ids = distinct_ids(min(rows, 9500), device_type)
    for part in ids.split(500):
        table.find_or_insert(part)
    assert table.num_slots == slots
    assert table.contains(ids).all()


def test_all_of_it(device_type):
    table = make(device_type, 10_000, 2, initial_capacity=100)
    table.reserve(table.capacity)
    assert table.num_slots == table.capacity


def test_less_than_there_is(device_type):
    table = filled(device_type, 200, 3000, initial_capacity=1000)
    before, slots = entries(table), table.num_slots
    ids = torch.tensor(list(before), device=device_type)
    found = table.find_slots(ids)
    for rows in (0, 10, 500):
        table.reserve(rows)
    assert table.num_slots == slots
    assert torch.equal(table.find_slots(ids), found)


@pytest.mark.parametrize("initial", [None, 100])
def test_bad_input(device_type, initial):
    table = filled(device_type, 50, 1000, initial_capacity=initial)
    before, slots = entries(table), table.num_slots
    for rows in (-1, table.capacity + 1, 10**15):
        with pytest.raises(ValueError, match=f"'table': {rows} rows .* {table.capacity}"):
            table.reserve(rows)
    assert (entries(table), table.num_slots) == (before, slots)


def test_clear_keeps_the_slots(device_type):
    table = filled(device_type, 500, 3000, initial_capacity=64)
    slots = table.num_slots
    table.clear()
    assert (table.size, table.num_slots) == (0, slots)
    ids = distinct_ids(500, device_type)
    table.find_or_insert(ids)
    assert table.num_slots == slots
    assert table.contains(ids).all()
