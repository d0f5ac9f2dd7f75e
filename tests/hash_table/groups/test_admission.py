"""Each table of a group admits ids by its own options; ids that are not admitted are looked up but
not trained."""

import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import (
    SGD,
    MinFrequency,
    Probability,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)

ADMISSIONS = {
    "all": None,
    "counted": MinFrequency(3, entries=4096),
    "sketched": MinFrequency(2, sketch_bytes=1 << 16),
    "half": Probability(0.5),
    "more": MinFrequency(2, entries=4096),
}


def make(device: str) -> TableGroup:
    specs = [
        TableSpec(name, 2000, 4, initializer=Uniform(-1, 1), admission=admission)
        for name, admission in ADMISSIONS.items()
    ]
    # The third and the last feature belong to one table.
    return TableGroup(specs, [0, 1, 2, 3, 4, 2], SGD(), device=device)


def test_each_table_has_its_own(device_type):
    """Tables count the same ids separately; two features of one table count together."""
    group = make(device_type)
    ids = random_ids(300)
    bags = Bags(ids.repeat(6), torch.arange(6 * 300 + 1), 300).to(device_type)
    first, second, third = (insert(group, bags).reshape(6, 300) >= 0 for _ in range(3))
    assert first[0].all()
    assert not first[1].any()
    assert first[2].all()
    assert torch.equal(first[2], first[5])
    assert 100 < first[3].sum() < 200
    assert not first[4].any()
    assert not second[1].any()
    assert second[4].all()
    assert third[1].all()
    assert (third[3] >= second[3]).all()
    assert (second[3] >= first[3]).all()
    unadmitted = [counters["unadmitted"] for counters in group.counters()]
    assert unadmitted[:3] == [0, 600, 0]
    assert unadmitted[3] == sum(int((~part[3]).sum()) for part in (first, second, third))
    assert unadmitted[4] == 300
    sizes = [counters["size"] for counters in group.counters()]
    assert sizes == [300, 300, 300, int(third[3].sum()), 300]


def test_unadmitted_ids_count_with_their_initial_rows_and_are_not_trained(device_type):
    spec = TableSpec("t", 100, 4, initializer=Uniform(-1, 1), admission=MinFrequency(2, entries=64))
    group = TableGroup([spec], [0], RowWiseAdagrad(), device=device_type)
    ids = random_ids(10)
    ids = torch.cat([ids, ids[:5]])  # five ids occur twice
    bags = Bags(ids, torch.arange(16), 15).to(device_type)
    out = lookup(group, bags)
    initial = initial_rows(ids, 4, table="t", initializer=Uniform(-1, 1))
    assert torch.equal(out.detach().cpu(), initial)
    out.backward(torch.ones_like(out))
    rows = rows_by_id(group)
    assert rows.keys() == set(ids[:5].tolist())
    by_id = dict(zip(ids.tolist(), initial, strict=True))
    assert all((row != by_id[id_]).all() for id_, row in rows.items())
    again = lookup(group, Bags.flat(ids[5:10]).to(device_type))  # the second lookup admits them
    torch.testing.assert_close(again.detach().cpu(), initial[5:10].sum(0, keepdim=True))
    again.backward(torch.ones_like(again))
    assert rows_by_id(group).keys() == set(ids.tolist())
