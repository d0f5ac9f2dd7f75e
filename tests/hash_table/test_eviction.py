"""A full table evicts its lowest score; a table that is not full evicts nothing."""

import pytest
import torch

from tests.support.batches import Bags, find, insert, random_ids, rows_by_id
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform


def make(capacity: int, eviction: str, device: str) -> TableGroup:
    return TableGroup(
        [TableSpec("t", capacity, 2, eviction, initializer=Uniform(-1, 1))], [0], device=device
    )


def insert_ids(group: TableGroup, ids: torch.Tensor, device: str) -> torch.Tensor:
    return insert(group, Bags.flat(ids.to(device)))


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_nothing_leaves_before_the_table_is_95_percent_full(device_type, eviction):
    group = make(64_000, eviction, device_type)
    for ids in random_ids(int(64_000 * 0.95)).split(1000):
        insert_ids(group, ids, device_type)
    (counters,) = group.counters()
    assert counters["evicted"] == counters["refused"] == 0
    assert counters["size"] == int(64_000 * 0.95)


def test_lru_keeps_the_newest(device_type):
    capacity = 32_000
    group = make(capacity, "lru", device_type)
    ids = random_ids(4 * capacity)
    for part in ids.split(1000):
        insert_ids(group, part, device_type)
    newest = ids[-capacity:]
    kept = (find(group, Bags.flat(newest.to(device_type))) >= 0).float().mean().item()
    # Exact eviction would keep all; buckets of 64 slots are slightly inexact.
    assert kept >= 0.96
    assert group.counters()[0]["size"] == capacity


def test_lru_touch_protects(device_type):
    """With one bucket eviction is exact: the least recently used id leaves."""
    group = make(64, "lru", device_type)
    ids = random_ids(100)
    for id_ in ids[:64].split(1):
        insert_ids(group, id_, device_type)
    insert_ids(group, ids[:10], device_type)  # the oldest ids become the newest
    insert_ids(group, ids[64:84], device_type)
    expected = set(ids[:10].tolist()) | set(ids[30:64].tolist()) | set(ids[64:84].tolist())
    assert rows_by_id(group).keys() == expected


def test_lfu_keeps_the_frequent(device_type):
    group = make(64, "lfu", device_type)
    ids = random_ids(84)
    for turn in range(3):  # ids 0..43 three times, 44..63 once
        insert_ids(group, ids[: 44 if turn else 64], device_type)
    insert_ids(group, ids[64:84], device_type)
    assert rows_by_id(group).keys() == set(ids[:44].tolist()) | set(ids[64:84].tolist())


def test_lfu_counts_every_occurrence(device_type):
    group = make(64, "lfu", device_type)
    ids = random_ids(3)
    insert_ids(group, ids[[0, 1, 1, 2, 2, 2]], device_type)
    insert_ids(group, ids[[2, 0, 2]], device_type)
    state = group.export_table(0)
    occupied = state.occupied.cpu()
    counts = dict(
        zip(
            state.ids.cpu()[occupied].tolist(),
            state.scores.cpu()[occupied].tolist(),
            strict=True,
        )
    )
    assert counts == {int(ids[0]): 2, int(ids[1]): 2, int(ids[2]): 5}


def test_lfu_among_equals_the_oldest_goes(device_type):
    group = make(64, "lfu", device_type)
    ids = random_ids(70)
    for id_ in ids[:64].split(1):
        insert_ids(group, id_, device_type)
    insert_ids(group, ids[64:], device_type)
    assert rows_by_id(group).keys() == set(ids[6:].tolist())


def test_an_evicted_id_starts_again_from_its_initial_row(device_type):
    group = make(64, "lru", device_type)
    ids = random_ids(128)
    insert_ids(group, ids[:64], device_type)
    before = rows_by_id(group)
    insert_ids(group, ids[64:], device_type)
    insert_ids(group, ids[:64], device_type)
    after = rows_by_id(group)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[id_], before[id_]) for id_ in before)


def test_counters(device_type):
    group = make(64, "lru", device_type)
    ids = random_ids(84)
    insert_ids(group, ids[:64], device_type)
    insert_ids(group, ids[:30], device_type)
    insert_ids(group, ids[64:], device_type)
    (counters,) = group.counters()
    assert counters == {
        "lookups": 114,
        "hits": 30,
        "inserted": 84,
        "evicted": 20,
        "refused": 0,
        "unadmitted": 0,
        "expired": 0,
        "fetched": 0,
        "written_back": 0,
        "host_hits": 30 if device_type == "cpu" else 0,
        "returned": 0,
        "size": 64,
        "capacity": 64,
    }


@pytest.mark.parametrize("capacity", [1, 2, 63, 65, 100, 129, 1000])
def test_a_table_holds_its_capacity(device_type, capacity):
    """The capacity is rounded up by less than one slot a bucket."""
    group = make(capacity, "lru", device_type)
    for part in random_ids(20 * capacity).split(max(1, capacity // 4)):
        insert_ids(group, part, device_type)
    buckets = -(-capacity // 64)
    assert capacity <= group.counters()[0]["size"] <= capacity + buckets
