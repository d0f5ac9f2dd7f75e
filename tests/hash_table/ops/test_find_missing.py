"""find_missing lists missing ids with their positions; contains tells which ids are present."""

import torch

from tests.support.tables import distinct_ids, make, random_rows


def test_ids_and_positions_in_order(device_type):
    table = make(device_type, 600)
    ids = distinct_ids(1001, device_type)
    table.insert_or_assign(ids[:500], random_rows(table, 500))
    order = torch.randint(0, 1001, (3001,), device=device_type)
    missing, positions = table.find_missing(ids[order])
    expected = (order >= 500).nonzero().flatten()
    assert torch.equal(positions, expected)
    assert torch.equal(missing, ids[order][expected])


def test_all_or_none_missing(device_type):
    table = make(device_type)
    ids = distinct_ids(20, device_type)
    missing, positions = table.find_missing(ids)
    assert torch.equal(missing, ids)
    assert positions.tolist() == list(range(20))
    table.find_or_insert(ids)
    missing, positions = table.find_missing(ids)
    assert missing.shape == positions.shape == (0,)
    missing, positions = table.find_missing(ids[:0])
    assert missing.shape == positions.shape == (0,)


def test_contains(device_type):
    table = make(device_type, 600)
    ids = distinct_ids(1001, device_type)
    table.insert_or_assign(ids[:500], random_rows(table, 500))
    order = torch.randint(0, 1001, (3001,), device=device_type)
    assert torch.equal(table.contains(ids[order]), order < 500)
    table.erase(ids[100:200])
    assert torch.equal(table.contains(ids[:500]).cpu(), torch.arange(500).div(100).floor() != 1)
