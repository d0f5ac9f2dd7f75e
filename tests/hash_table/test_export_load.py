"""A table's exported state loads into a table of the same shape; anything else is refused."""

import dataclasses

import pytest
import torch

from tests.support.batches import Bags, find, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform


def trained(device: str, eviction: str = "lfu", ids: torch.Tensor | None = None) -> TableGroup:
    group = TableGroup(
        [TableSpec("t", 300, 6, eviction, initializer=Uniform(-1, 1))],
        [0],
        RowWiseAdagrad(),
        device=device,
    )
    pool = random_ids(500) if ids is None else ids
    for part in pool.split(100):
        bags = Bags(part, torch.arange(len(part) + 1), len(part)).to(device)
        lookup(group, bags).backward(torch.randn(len(part), 6, device=device))
    return group


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_full_table_comes_back_whole(device_type, eviction):
    pool = random_ids(500)
    source = trained(device_type, eviction, pool)
    target = trained(device_type, eviction)
    state = source.export_table(0)
    target.load_table(0, state)
    again = target.export_table(0)
    for name, value in vars(state).items():
        assert torch.equal(getattr(again, name), value), name
    assert (state.states[state.occupied] > 0).all()
    everything = Bags.flat(pool.to(device_type))
    assert torch.equal(find(target, everything), find(source, everything))
    # Both tables continue alike: the same ids leave.
    for part in random_ids(200).to(device_type).split(1):
        insert(source, Bags.flat(part))
        insert(target, Bags.flat(part))
    assert rows_by_id(source).keys() == rows_by_id(target).keys()


def test_free_slots_are_zeros(device_type):
    group = TableGroup(
        [TableSpec("t", 300, 6, initializer=Uniform(1, 2))], [0], SGD(), device=device_type
    )
    insert(group, Bags.flat(random_ids(10).to(device_type)))
    state = group.export_table(0)
    assert int(state.occupied.sum()) == 10
    free = ~state.occupied
    assert (state.rows[free] == 0).all()
    assert (state.ids[free] == 0).all()


def refused(change, match):
    source, target = trained("cpu"), trained("cpu")
    before = target.export_table(0)
    with pytest.raises(ValueError, match=match):
        target.load_table(0, change(source.export_table(0)))
    after = target.export_table(0)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(before).values(), vars(after).values(), strict=True)
    )


def test_another_shape_is_refused():
    refused(
        lambda s: dataclasses.replace(s, rows=s.rows[:, :5]),
        r"table 't': rows must have shape \[300, 6\], but has \[300, 5\]",
    )


def test_another_dtype_is_refused():
    refused(
        lambda s: dataclasses.replace(s, ids=s.ids.int()),
        r"table 't': ids must be of dtype Long, but is of Int",
    )


def test_misplaced_ids_are_refused():
    refused(
        lambda s: dataclasses.replace(s, ids=s.ids.roll(1)),
        r"table 't': \d+ of the ids to load are in slots where they can't be found",
    )


def test_an_id_that_stands_twice_is_refused():
    def twice(state):
        ids = state.ids.clone()
        ids[1] = ids[0]  # neighbours: the same bucket
        return dataclasses.replace(state, ids=ids)

    refused(twice, r"table 't': 1 of the ids to load")


def test_clear(device_type):
    group = trained(device_type)
    group.clear_table(0)
    assert group.counters()[0]["size"] == 0
    assert rows_by_id(group) == {}
    insert(group, Bags.flat(random_ids(20).to(device_type)))
    assert group.counters()[0]["size"] == 20
