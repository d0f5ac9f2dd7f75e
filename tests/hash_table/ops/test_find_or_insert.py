"""find_or_insert finds present ids and inserts others with initial rows; it returns rows or
slots."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import (
    constant_scores,
    contents,
    distinct_ids,
    expected_initial_rows,
    make,
    random_rows,
)
from torchrec_hkv.hash_table import Constant, Normal, TruncatedNormal, Uniform


@pytest.mark.parametrize("policy", POLICIES)
def test_rows(device_type, policy):
    table = make(device_type, 600, dim=5, eviction=policy)
    ids = distinct_ids(501, device_type)
    rows = random_rows(table, 201)
    table.insert_or_assign(ids[:201], rows, constant_scores(table, 201))
    order = torch.randint(0, 501, (3001,), device=device_type)
    expected = torch.cat([rows, expected_initial_rows(table, ids[201:])])
    found_rows, found = table.find_or_insert(ids[order], constant_scores(table, 3001))
    assert torch.equal(found, order < 201)  # before the call, also for repeated ids
    assert torch.equal(found_rows, expected[order])
    met = torch.cat([torch.arange(201, device=device_type), order]).unique()
    assert table.size == len(met)
    again, found = table.find(ids[met])
    assert found.all()
    assert torch.equal(again, expected[met])


@pytest.mark.parametrize("policy", POLICIES)
def test_slots(device_type, policy):
    table = make(device_type, 600, dim=5, eviction=policy)
    ids = distinct_ids(501, device_type)
    first, found = table.find_or_insert_slots(ids[:201], constant_scores(table, 201))
    assert not found.any()
    order = torch.randint(0, 501, (3001,), device=device_type)
    slots, found = table.find_or_insert_slots(ids[order], constant_scores(table, 3001))
    assert torch.equal(found, order < 201)
    assert torch.equal(slots[found], first[order[found]])
    assert torch.equal(slots, table.find_slots(ids[order]))
    assert len(slots.unique()) == len(order.unique())
    assert torch.equal(table.find(ids[order])[0], expected_initial_rows(table, ids[order]))


def test_more_ids_than_the_table_holds(device_type):
    """Ids without a slot get their initial rows; what the call has touched stays."""
    table = make(device_type, 64)
    ids = distinct_ids(100, device_type)
    rows, found = table.find_or_insert(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert table.size == 64
    there = table.contains(ids)
    table.clear()
    slots, _ = table.find_or_insert_slots(ids)
    assert (slots >= 0).sum() == 64
    assert torch.equal(slots >= 0, table.contains(ids))
    assert len(slots.unique()) == 65
    if device_type == "cpu":  # in the order of the call
        assert there.tolist() == [True] * 64 + [False] * 36


def test_an_empty_call(device_type):
    table = make(device_type, state_dim=3)
    none = distinct_ids(0, device_type)
    rows, found = table.find_or_insert(none)
    assert rows.shape == (0, 4)
    assert found.shape == (0,)
    slots, found = table.find_or_insert_slots(none)
    assert slots.shape == found.shape == (0,)
    assert contents(table) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"name": "users", "seed": -3, "initializer": Uniform(-0.25, 0.5)},
        {"initializer": Constant(0.125)},
        {"initializer": None},
        {"name": "users", "initializer": Normal(0.5, 2)},
        {"seed": 9, "initializer": TruncatedNormal(0, 1, -1, 2)},
    ],
)
def test_initial_rows_by_name_seed_and_initializer(device_type, options):
    ids = distinct_ids(50, device_type)
    table = make(device_type, dim=9, **options)
    expected = expected_initial_rows(table, ids, **options)
    assert torch.equal(table.find(ids)[0], expected)
    assert torch.equal(table.find_or_insert(ids)[0], expected)
    assert torch.equal(table.find(ids)[0], expected)


def test_states_of_new_ids_are_zero(device_type):
    table = make(device_type, 64, state_dim=3)
    for ids in distinct_ids(640, device_type).split(50):
        table.find_or_insert(ids)
        assert all(state == (0.0, 0.0, 0.0) for _, _, state in contents(table).values())
