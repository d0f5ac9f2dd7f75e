"""Files keep counts of ids that are not admitted, but no options of the process."""

import pytest
import torch

from tests.support.saved_tables import assert_refused, assert_same, filled, snapshot
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import HashTable, MinFrequency, Probability

WHERE = [{"entries": 64}, {"sketch_bytes": 4096}]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("count", [2, 300])
def test_counts_go_on(device_type, tmp_path, where, count):
    table = make(device_type, admission=MinFrequency(count, **where))
    ids = distinct_ids(10, device_type)
    table.find_or_insert(ids[:5].repeat(count))
    table.find_or_insert(ids.repeat(count - 1))
    table.save(tmp_path)
    before = snapshot(table)
    loaded = make(device_type, admission=MinFrequency(count, **where))
    loaded.find_or_insert(distinct_ids(20, device_type))
    loaded.load(tmp_path)
    assert_same(before, snapshot(loaded))
    assert loaded.size == 5
    loaded.find_or_insert(ids)
    assert loaded.size == 10
    assert loaded.counters()["evicted"] == 0


def test_cells_move_to_another_number_of_them(device_type, tmp_path):
    ids = distinct_ids(150, device_type)
    table = make(device_type, 2000, admission=MinFrequency(3, entries=2000))
    table.find_or_insert(ids.repeat(2))
    table.save(tmp_path)
    for entries in (1000, 2008, 9000):
        loaded = make(device_type, 2000, admission=MinFrequency(3, entries=entries))
        loaded.load(tmp_path, batch_bytes=1 << 14)
        loaded.find_or_insert(ids)
        assert loaded.size == 150


@pytest.mark.parametrize(
    "admission", [None, Probability(1.0), MinFrequency(2, sketch_bytes=1 << 12)]
)
def test_other_kinds_start_anew(device_type, tmp_path, admission):
    table = make(device_type, admission=MinFrequency(2, entries=64))
    ids = distinct_ids(10, device_type)
    table.find_or_insert(ids)
    table.save(tmp_path)
    loaded = make(device_type, admission=admission)
    loaded.load(tmp_path)
    loaded.find_or_insert(ids)
    assert loaded.size == (0 if isinstance(admission, MinFrequency) else 10)


@pytest.mark.parametrize("where", WHERE)
def test_damaged_counts_are_refused(tmp_path, where):
    table = make("cpu", admission=MinFrequency(2, **where))
    table.find_or_insert(distinct_ids(10, "cpu"))
    table.save(tmp_path)
    (path,) = tmp_path.glob("counts-*.bin")
    good = path.read_bytes()
    for bad in (good[:-1], good + b"0", bytes([good[0] ^ 1]) + good[1:], None):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        assert_refused(lambda t: t.load(tmp_path), make("cpu"), path.name)
        path.write_bytes(good)


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
    loaded = HashTable.from_file(tmp_path, device=device_type)
    assert_same(before, snapshot(loaded))
    assert loaded._group.tables[0].admission is None
    loaded = HashTable.from_file(
        tmp_path,
        device=device_type,
        admission=MinFrequency(2, entries=64),
        expire_after=1,
        strict=True,
    )
    assert_same(before, snapshot(loaded))
    new = distinct_ids(10, device_type)
    assert (loaded.find_or_insert_slots(new)[0] == -1).all()
    assert loaded.counters()["expired"] > 0
    assert torch.equal(loaded.find_or_insert_slots(new)[0] >= 0, torch.ones_like(new).bool())
