"""The exported state of a growing table has the shape of its full capacity."""

import dataclasses
import itertools

import pytest
import torch

from tests.support.geometry import geometry
from tests.support.saved_tables import assert_same, buckets_of, entries, filled, like, snapshot
from tests.support.tables import distinct_ids, make

CAPACITY, INITIAL = 4000, 250
*_, BUCKET_SLOTS = geometry(CAPACITY, INITIAL)


@pytest.mark.parametrize("n", [0, 30, 1000, 3700])
def test_round_trip(device_type, n):
    table = filled(device_type, n, CAPACITY, initial_capacity=INITIAL, state_dim=2, eviction="lfu")
    state = table._group.export_table(0)
    by_slot = {field.name for field in dataclasses.fields(state)} - {"optimizer_step"}
    for name in by_slot:
        assert getattr(state, name).shape[0] == table.capacity
        assert not getattr(state, name)[table.num_slots :].any()
    fresh = like(table, initial_capacity=INITIAL)
    fresh._group.load_table(0, state)
    assert fresh.size == n
    assert entries(fresh) == entries(table)
    if n >= 30:  # so many ids are in valid slots of one geometry only
        assert fresh.num_slots == table.num_slots
        before = snapshot(table)
        del before["clock and epoch"]
        assert_same(before, snapshot(fresh))
    ids = distinct_ids(2000, device_type)
    fresh.find_or_insert(ids)
    assert fresh.contains(ids).all() or fresh.num_slots == fresh.capacity


def test_what_was_reserved_stays(device_type):
    table = filled(device_type, 200, CAPACITY, initial_capacity=INITIAL)
    other = make(device_type, CAPACITY, initial_capacity=INITIAL)
    other.find_or_insert(distinct_ids(3000, device_type))
    slots = other.num_slots
    assert slots > table.num_slots
    other._group.load_table(0, table._group.export_table(0))
    assert other.num_slots == slots
    assert entries(other) == entries(table)
    assert other.size == 200


def test_grows_with_the_state(device_type):
    table = filled(device_type, 3000, CAPACITY, initial_capacity=INITIAL)
    fresh = like(table, initial_capacity=INITIAL)
    slots = fresh.num_slots
    fresh._group.load_table(0, table._group.export_table(0))
    assert slots < fresh.num_slots == table.num_slots
    assert entries(fresh) == entries(table)


def test_a_damaged_state_is_refused(device_type):
    table = filled(device_type, 500, CAPACITY, initial_capacity=INITIAL)
    before, slots = entries(table), table.num_slots
    state = table._group.export_table(0)
    ids = state.ids.clone()
    slot = int(state.occupied.nonzero().flatten()[7])
    buckets = slots // BUCKET_SLOTS
    elsewhere = (i for i in itertools.count() if slot // BUCKET_SLOTS not in buckets_of(i, buckets))
    ids[slot] = next(elsewhere)
    with pytest.raises(ValueError, match="can't be found"):
        table._group.load_table(0, dataclasses.replace(state, ids=ids))
    shorter = dataclasses.replace(state, ids=state.ids[: table.num_slots])
    with pytest.raises(ValueError, match="ids must have shape"):
        table._group.load_table(0, shorter)
    assert (entries(table), table.num_slots) == (before, slots)
    assert torch.equal(table._group.export_table(0).ids, state.ids)
