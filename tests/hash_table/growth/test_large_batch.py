"""A batch larger than the table makes it double several times; repeated ids count once."""

import torch

from tests.support.growing_tables import slots_needed
from tests.support.saved_tables import entries
from tests.support.tables import distinct_ids, expected_initial_rows, make


def test_several_doublings(device_type):
    table = make(device_type, 50_000, 2, initial_capacity=64)
    ids = distinct_ids(20_000, device_type)
    rows, found = table.find_or_insert(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert table.num_slots == slots_needed(50_000, 64, 20_000)
    assert len(entries(table)) == 20_000


def test_one_id_many_times(device_type):
    table = make(device_type, 50_000, 2, initial_capacity=64)
    slots = table.num_slots
    table.find_or_insert(torch.full((20_000,), 7, device=device_type))
    assert table.num_slots == slots


def test_ids_that_are_there(device_type):
    table = make(device_type, 50_000, 2, initial_capacity=640)
    ids = distinct_ids(500, device_type)
    table.find_or_insert(ids)
    slots = table.num_slots
    for _ in range(8):
        table.find_or_insert(ids.repeat(3))
    assert table.num_slots == slots


def test_a_table_that_is_looked_at_in_every_call_grows(device_type):
    """A table grows if each call would otherwise have to wait for the device to read its size."""
    table = make(device_type, 1 << 16, 2, initial_capacity=640)
    assert table.num_slots == 1024
    ids = distinct_ids(500, device_type)
    for _ in range(40):
        table.find_or_insert(ids)
    slots = table.num_slots
    assert slots == slots_needed(1 << 16, 640, 2 * len(ids)) == 2048
    for _ in range(40):
        table.find_or_insert(ids)
    assert table.num_slots == slots
    assert table.size == 500


def test_a_batch_larger_than_the_capacity(device_type):
    table = make(device_type, 640, 2, initial_capacity=64)
    ids = distinct_ids(2000, device_type)
    slots, _ = table.find_or_insert_slots(ids)
    assert table.num_slots == table.capacity == table.size
    assert table.counters()["refused"] == 2000 - table.size == int((slots < 0).sum())
