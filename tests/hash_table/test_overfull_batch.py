"""A batch with more distinct ids than the table fills it; other ids are refused, counted and looked
up by their initial rows."""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import (
    SGD,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_refused_ids(device_type, eviction):
    spec = TableSpec("t", 100, 4, eviction, initializer=Uniform(-1, 1))
    group = TableGroup([spec], [0], SGD(), device=device_type)
    insert(group, Bags.flat(random_ids(100).to(device_type)))  # all of these will be evicted
    ids = random_ids(500)
    bags = Bags(ids, torch.arange(501), 500).to(device_type)
    out = lookup(group, bags)
    initial = initial_rows(ids, 4, table="t", initializer=Uniform(-1, 1))
    assert torch.equal(out.detach().cpu(), initial)
    (counters,) = group.counters()
    assert counters["size"] == 100
    assert counters["refused"] == 400
    assert rows_by_id(group).keys() <= set(ids.tolist())

    out.backward(torch.ones_like(out))  # trains ids with a row, drops the rest
    rows = rows_by_id(group)
    by_id = dict(zip(ids.tolist(), initial, strict=True))
    for id_, row in rows.items():
        torch.testing.assert_close(row, by_id[id_] - 0.1)


def test_same_answer_whatever_the_number_of_threads():
    results = []
    ids = random_ids(5000)
    threads = torch.get_num_threads()
    for number in (1, 2, 4):
        torch.set_num_threads(number)
        group = TableGroup(
            [TableSpec("t", 1000, 4, initializer=Uniform(-1, 1))], [0], RowWiseAdagrad()
        )
        for part in ids.split(2500):
            out = lookup(group, Bags(part, torch.arange(0, 2501, 2), 1250))
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        state = group.export_table(0)
        results.append((state.ids, state.rows, state.states))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
