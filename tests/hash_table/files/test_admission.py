"""Counts of ids that are not admitted start anew after a load; a file says nothing of options that
are the process's."""

import pytest
import torch

from tests.support.saved_tables import assert_same, filled, snapshot
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import HashTable, MinFrequency, Probability


@pytest.mark.parametrize("where", [{"entries": 64}, {"sketch_bytes": 4096}])
def test_counts_start_anew(device_type, tmp_path, where):
    table = make(device_type, admission=MinFrequency(2, **where))
    ids = distinct_ids(10, device_type)
    table.find_or_insert(ids[:5])
    table.find_or_insert(ids[:5])
    table.find_or_insert(ids)
    table.save(tmp_path)
    before = snapshot(table)
    table.load(tmp_path)
    assert_same(before, snapshot(table))
    table.find_or_insert(ids)
    assert table.size == 5
    table.find_or_insert(ids)
    assert table.size == 10


def test_load_table_starts_counts_anew(device_type):
    table = make(device_type, admission=MinFrequency(2, entries=64))
    ids = distinct_ids(10, device_type)
    table.find_or_insert(ids)
    table._group.load_table(0, table._group.export_table(0))
    table.find_or_insert(ids)
    assert table.size == 0


def test_a_table_of_other_options_loads(device_type, tmp_path):
    table = filled(device_type, expire_after=1000, admission=Probability(1.0), strict=True)
    table.save(tmp_path)
    before = snapshot(table)
    other = make(device_type, 700)
    other.load(tmp_path)
    assert_same(before, snapshot(other))
    made = HashTable.from_file(tmp_path, device=device_type)
    assert_same(before, snapshot(made))
    assert made._group.tables[0].admission is None
    made = HashTable.from_file(
        tmp_path,
        device=device_type,
        admission=MinFrequency(2, entries=64),
        expire_after=1,
        strict=True,
    )
    assert_same(before, snapshot(made))
    new = distinct_ids(10, device_type)
    assert (made.find_or_insert_slots(new)[0] == -1).all()
    assert made.counters()["expired"] > 0
    assert torch.equal(made.find_or_insert_slots(new)[0] >= 0, torch.ones_like(new).bool())
