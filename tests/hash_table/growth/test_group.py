"""Each table of a group grows by itself; the slots of the others do not change."""

import pytest
import torch

from tests.support.batches import Bags, find, insert, lookup, random_ids, rows_by_id
from tests.support.growing_tables import slots_needed
from torchrec_hkv.hash_table import SGD, Optimizer, RowWiseAdagrad, TableGroup, TableSpec, Uniform

CAPACITIES = (2000, 900, 3000)


def make(
    device: str, initial: tuple[int | None, ...], optimizer: Optimizer | None = None
) -> TableGroup:
    specs = [
        TableSpec(f"t{i}", capacity, 2 + i, initializer=Uniform(-1, 1), initial_capacity=begin)
        for i, (capacity, begin) in enumerate(zip(CAPACITIES, initial, strict=True))
    ]
    return TableGroup(specs, [0, 1, 2, 1], optimizer, device=device)


def batch(parts: list[torch.Tensor], device: str) -> Bags:
    lengths = torch.tensor([0] + [len(part) for part in parts])
    return Bags(torch.cat(parts), lengths.cumsum(0), 1).to(device)


def present(group: TableGroup) -> list[int]:
    return [group.present_slots(table) for table in range(3)]


def test_others_keep_their_slots(device_type):
    group = make(device_type, (64, 900, 100))
    first = batch([random_ids(30) for _ in range(4)], device_type)
    slots = insert(group, first)
    before = present(group)
    ends = torch.tensor([2000, 900, 3000]).cumsum(0)
    many = batch([random_ids(1000), *(random_ids(3) for _ in range(3))], device_type)
    insert(group, many)
    assert present(group) == [slots_needed(2000, 64, 1030), *before[1:]]
    again = find(group, first)
    assert torch.equal(again[30:], slots[30:])
    assert not torch.equal(again[:30], slots[:30])
    # Slots are numbered as if every table had its full capacity.
    for table, part in ((0, again[:30]), (1, again[30:60]), (2, again[60:90]), (1, again[90:])):
        low = 0 if table == 0 else int(ends[table - 1])
        assert low <= int(part.min())
        assert int(part.max()) < group.num_slots
    found = find(group, many)
    assert int(found.min()) >= 0
    assert len(set(found.tolist())) == len(found)
    sizes = group.sizes()
    assert sizes == [1030, 66, 33]
    assert [len(rows_by_id(group, table)) for table in range(3)] == sizes


@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad()], ids=["sgd", "rowwise_adagrad"])
def test_trains_as_one_that_does_not_grow(device_type, optimizer):
    groups = [make(device_type, begin, optimizer) for begin in ((64, 1, 200), (None,) * 3)]
    pool = random_ids(800)
    for step in range(12):
        bags = Bags.random(4, 64, pool[: 70 * (step + 1)]).to(device_type)
        outs = [lookup(group, bags) for group in groups]
        assert torch.equal(outs[0], outs[1])
        grad = torch.randn_like(outs[0])
        for out in outs:
            out.backward(grad)
    assert present(groups[0])[0] > 64
    for table in range(3):
        rows = [rows_by_id(group, table) for group in groups]
        assert rows[0].keys() == rows[1].keys()
        assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])
    names = ("lookups", "hits", "inserted", "evicted", "refused", "size")
    counters = [[{n: c[n] for n in names} for c in group.counters()] for group in groups]
    assert counters[0] == counters[1]
