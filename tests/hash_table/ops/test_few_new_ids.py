"""A call with a few new ids, each at several positions, on a large table."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, expected_initial_rows, make


def check(table, ids, present):
    """Looks ``ids`` up in a table that has ``present``; each new id must be inserted once."""
    before = len(contents(table))
    slots, found = table.find_or_insert_slots(ids)
    there = torch.isin(ids, present)
    torch.testing.assert_close(found, there)
    assert (slots >= 0).all()
    assert len(contents(table)) == before + len(ids[~there].unique())
    torch.testing.assert_close(table.find_slots(ids), slots)
    rows, _ = table.find(ids)
    torch.testing.assert_close(rows, expected_initial_rows(table, ids))


@pytest.mark.parametrize("copies", [1, 2, 40])
@pytest.mark.parametrize("load", [0.0, 0.5, 0.74, 0.9])
def test_each_is_placed_once(device_type, load, copies):
    capacity = 1 << 14
    table = make(device_type, capacity)
    ids = distinct_ids(capacity, device_type)
    present, new = ids[: int(load * capacity)], ids[-800 // copies :]
    if len(present):
        table.find_or_insert_slots(present)
    batch = torch.cat([present[:5000], new.repeat(copies)])
    check(table, batch[torch.randperm(len(batch), device=batch.device)], present)


def test_one_of_many_copies(device_type):
    table = make(device_type, 1 << 16)
    ids = distinct_ids(1001, device_type)
    present, hot = ids[:1000], ids[1000:]
    table.find_or_insert_slots(present)
    batch = torch.cat([present, hot.repeat(4000)])
    check(table, batch[torch.randperm(len(batch), device=batch.device)], present)


@pytest.mark.parametrize("there", [0, 40, 46, 47, 48, 60])
def test_in_a_single_bucket(device_type, there):
    table = make(device_type, 64)
    ids = distinct_ids(64, device_type)
    if there:
        table.find_or_insert_slots(ids[:there])
    check(table, torch.cat([ids[there : there + 2]] * 2), ids[:there])
