"""Hits are counted separately for rows in HBM and in host memory."""

import torch

from tests.support.batches import Bags, insert
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec


def test_a_table_in_one_memory(device_type):
    table = make(device_type, 256)
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids)
    table.find_or_insert(ids[:30])
    counted = table.counters()
    assert counted["hits"] == 30
    assert counted["host_hits"] == (30 if device_type == "cpu" else 0)


def test_each_table_of_a_group_by_itself(device_type):
    specs = [TableSpec("a", 64, 4), TableSpec("b", 64, 4)]
    group = TableGroup(specs, [0, 1], SGD(), device=device_type)
    ids = torch.arange(10, device=device_type)
    bags = Bags(torch.cat([ids, ids]), torch.tensor([0, 10, 20], device=device_type), 1)
    for _ in range(3):
        insert(group, bags)
    on_device = group.device_counters().tolist()
    assert [table["hits"] for table in group.counters()] == [20, 20]
    expected = [20, 20] if device_type == "cpu" else [0, 0]
    assert [table["host_hits"] for table in group.counters()] == expected
    assert [row[9] for row in on_device] == expected
