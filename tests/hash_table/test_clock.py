"""A group's clock counts only calls that touch rows."""

import pytest
import torch

from tests.support.batches import Bags, find, insert, lookup, random_ids
from tests.support.tables import distinct_ids, make, random_rows, scores_of
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec


def test_what_counts_in_a_group(device_type):
    group = TableGroup([TableSpec("t", 64, 2)], [0], SGD(), device=device_type)
    bags = Bags.flat(random_ids(10).to(device_type))
    assert group.clock == 0
    insert(group, bags)
    assert group.clock == 1
    out = lookup(group, bags)
    assert group.clock == 2
    out.backward(torch.ones_like(out))
    find(group, bags)
    assert group.clock == 2
    insert(group, Bags.flat(bags.ids[:0]))  # a call without ids counts
    assert group.clock == 3
    group.set_clock(41)
    insert(group, bags)
    assert group.clock == 42


def test_what_counts_in_a_table(device_type):
    table = make(device_type)
    ids = distinct_ids(5, device_type)
    rows, belief = random_rows(table, 5), torch.ones(5, dtype=torch.bool, device=device_type)
    counting = [
        lambda: table.find_or_insert(ids),
        lambda: table.find_or_insert_slots(ids),
        lambda: table.insert_or_assign(ids, rows),
        lambda: table.insert_and_evict(ids, rows),
        lambda: table.accum_or_assign(ids, rows, belief),
        lambda: table.assign(ids, rows),
        lambda: table.assign_scores(ids),
    ]
    for call, operation in enumerate(counting):
        operation()
        assert table._group.clock == call + 1
        assert set(scores_of(table).values()) == {call + 1}
    for operation in (
        lambda: table.find(ids),
        lambda: table.contains(ids),
        lambda: table.assign_rows(ids, rows),
        lambda: table.erase(ids),
    ):
        operation()
        assert table._group.clock == len(counting)


def test_the_last_step(device_type):
    group = TableGroup([TableSpec("t", 64, 2)], [0], SGD(), device=device_type)
    bags = Bags.flat(random_ids(10).to(device_type))
    group.set_clock(2**32 - 2)
    insert(group, bags)
    assert group.clock == 2**32 - 1
    with pytest.raises(RuntimeError, match=r"a table counts at most 2\^32 - 1 calls"):
        insert(group, bags)
    assert group.clock == 2**32 - 1
