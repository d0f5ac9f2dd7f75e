"""Each table of a group expires by its own options, but never entries that await a backward."""

import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform


def test_each_table_has_its_own(device_type):
    ages = (None, 2, 1, 70)
    specs = [TableSpec(str(t), 64 * (7 * t + 1), 4, expire_after=age) for t, age in enumerate(ages)]
    group = TableGroup(specs, [0, 1, 2, 3], device=device_type)
    ids = random_ids(60)
    bags = Bags(ids.repeat(4), torch.arange(241), 60).to(device_type)
    none = Bags(ids[:0], torch.zeros(241, dtype=torch.int64), 60).to(device_type)
    insert(group, bags)
    sizes = []
    for _ in range(70 + 64):
        insert(group, none)
        sizes.append(group.sizes())
    by_table = list(zip(*sizes, strict=True))
    assert set(by_table[0]) == {60}
    assert by_table[1][:2] == (60, 60)
    assert by_table[1][3] == 0
    assert by_table[2][:2] == (60, 0)
    assert by_table[3][69] == 60
    assert by_table[3][-1] == 0
    expired = [counters["expired"] for counters in group.counters()]
    assert expired == [0, 60, 60, 60]


def test_pinned_rows_stay_until_their_backward(device_type):
    spec = TableSpec("t", 128, 2, initializer=Uniform(-1, 1), expire_after=2)
    group = TableGroup([spec], [0], SGD(), device=device_type)
    ids = random_ids(50).to(device_type)
    insert(group, Bags.flat(ids[:20]))
    out = lookup(group, Bags.flat(ids[20:40]))
    before = rows_by_id(group)
    for _ in range(6):
        insert(group, Bags.flat(ids[40:]))
    group.expire()
    assert rows_by_id(group).keys() == set(ids[20:].tolist())
    out.backward(torch.ones_like(out))
    for id_, row in rows_by_id(group).items():
        if id_ in ids[20:40].tolist():
            torch.testing.assert_close(row, before[id_] - 0.1)
    group.expire()
    assert rows_by_id(group).keys() == set(ids[40:].tolist())
    assert group.counters()[0]["expired"] == 40
