"""A growing table keeps its counts of ids that are not admitted yet."""

import pytest
import torch

from tests.support.id_streams import id_stream
from torchrec_hkv.hash_table import HashTable, MinFrequency, table_memory

ADMISSIONS = [
    MinFrequency(3, entries=40_000),
    MinFrequency(3, sketch_bytes=1 << 20),
]


@pytest.mark.parametrize("admission", ADMISSIONS, ids=["counted", "sketched"])
def test_counts_outlive_growth(device_type, admission):
    table = HashTable(1, 8000, initial_capacity=64, admission=admission, device=device_type)
    ids = id_stream("hashed", 5000).to(device_type)
    slow, quick = ids[:200], ids[200:]
    for _ in range(2):
        table.find_or_insert(slow)
    assert table.size == 0
    before = table.num_slots
    for part in quick.split(500):
        for _ in range(3):
            table.find_or_insert(part)
    assert table.num_slots > before
    assert table.contains(quick).all()
    assert not table.contains(slow).any()
    table.find_or_insert(slow)
    assert table.contains(slow).all()
    assert table.counters()["evicted"] == 0


def test_ids_that_are_not_admitted_need_little_room(device_type):
    """A lookup counts all new ids of its batch; the table grows for one batch, not for all."""
    admission = MinFrequency(2, entries=400_000)
    table = HashTable(1, 1 << 16, initial_capacity=1024, admission=admission, device=device_type)
    for part in id_stream("hashed", 40_000).to(device_type).split(400):
        table.find_or_insert(part)
    assert table.size == 0
    assert table.num_slots == 1024


def test_memory(device_type):
    """Announced memory includes the counts, which do not grow."""
    admission = MinFrequency(2, entries=1000)
    table = HashTable(4, 4096, initial_capacity=512, admission=admission, device=device_type)
    group = table._group
    counts = table_memory(4096, 4, 0, "lru", admission=admission, initial_capacity=512).bytes
    counts -= table_memory(4096, 4, 0, "lru", initial_capacity=512).bytes
    pages = 8 * (2 << 20) if device_type == "cuda" else 0
    first = group.hbm_bytes(0) + group.host_bytes(0)
    table.reserve(4096)
    last = group.hbm_bytes(0) + group.host_bytes(0)
    assert counts > 0
    assert table.num_slots == 8 * 512
    assert abs((last - counts) - 8 * (first - counts)) <= 8 * pages


@pytest.mark.parametrize("how", ["clear", "load"])
def test_forgotten_with_what_the_table_holds(device_type, how, tmp_path):
    admission = MinFrequency(2, entries=1000)
    table = HashTable(1, 4000, initial_capacity=64, admission=admission, device=device_type)
    ids = torch.arange(50, device=device_type)
    table.save(tmp_path / "saved")
    table.find_or_insert(ids)
    if how == "clear":
        table.clear()
    else:
        table.load(tmp_path / "saved")
    table.find_or_insert(ids)
    assert table.size == 0
    table.find_or_insert(ids)
    assert table.size == 50
