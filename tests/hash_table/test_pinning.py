"""Rows that a forward found stay until its backward, even if other batches come between."""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform


def make(eviction: str, device: str) -> TableGroup:
    return TableGroup(
        [TableSpec("t", 64, 2, eviction, initializer=Uniform(-1, 1))], [0], SGD(), device=device
    )


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_rows_stay_until_the_backward(device_type, eviction):
    group = make(eviction, device_type)
    ids = random_ids(200).to(device_type)
    out = lookup(group, Bags.flat(ids[:40]))
    before = rows_by_id(group)
    insert(group, Bags.flat(ids[40:100]))  # 24 slots are free, the other 40 are pinned
    assert group.counters()[0]["refused"] == 36
    assert group.counters()[0]["evicted"] == 0
    out.backward(torch.ones_like(out))
    after = rows_by_id(group)
    for id_ in ids[:40].tolist():
        torch.testing.assert_close(after[id_], before[id_] - 0.1)
    insert(group, Bags.flat(ids[100:164]))
    assert rows_by_id(group).keys() == set(ids[100:164].tolist())


def test_a_graph_dropped_without_backward_ends_the_pin(device_type):
    group = make("lru", device_type)
    ids = random_ids(128).to(device_type)
    out = lookup(group, Bags.flat(ids[:64]))
    del out
    insert(group, Bags.flat(ids[64:]))
    assert rows_by_id(group).keys() == set(ids[64:].tolist())


def test_no_pin_without_grad(device_type):
    group = make("lru", device_type)
    ids = random_ids(128).to(device_type)
    with torch.no_grad():
        out = lookup(group, Bags.flat(ids[:64]))
    assert not out.requires_grad
    with torch.inference_mode():
        lookup(group, Bags.flat(ids[:64]))
    insert(group, Bags.flat(ids[64:]))
    assert group.counters()[0]["refused"] == 0


def test_a_graph_keeps_its_tables(device_type):
    group = make("lru", device_type)
    handle = group.handle
    bags = Bags.flat(random_ids(10).to(device_type))
    weights = torch.rand(10, device=device_type, requires_grad=True)
    out = lookup(group, bags, weights)
    del group
    out.backward(torch.ones_like(out))
    assert (weights.grad != 0).all()
    del out
    with pytest.raises(ValueError, match=rf"no table group has the handle {handle}"):
        torch.ops.torchrec_hkv.find(handle, bags.ids, bags.offsets, 1)
