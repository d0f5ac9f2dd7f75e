"""An id whose two hashes give the same bucket may be in the next bucket; growth moves such ids
correctly.

Such ids are rare in a table of random ids, so all ids of this test are of that kind.
"""

import itertools

import pytest
import torch

from tests.support.growing_tables import check_buckets, ids_of_one_bucket
from tests.support.saved_tables import entries
from tests.support.tables import make, random_rows

BUCKETS = 4


def table_of(device: str, ids: list[int]):
    # The table begins with four full buckets of 64 slots.
    table = make(device, 32 * 64, 3, state_dim=1, eviction="lfu", initial_capacity=64 * BUCKETS)
    assert table.num_slots == 64 * BUCKETS
    # Small parts, since an id's first bucket fills to three quarters before its second is used.
    for part in torch.tensor(ids, device=device).split(16):
        table.insert_or_assign(part, random_rows(table, len(part)))
    assert table.num_slots == 64 * BUCKETS
    assert table.counters()["evicted"] == 0
    return table


def standing_in_second(table, ids: list[int], bucket: int) -> int:
    slots = table.find_slots(torch.tensor(ids, device=table.device))
    return int((slots // 64 == (bucket + 1) % BUCKETS).sum())


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_two_full_buckets(device_type, bucket):
    ids = list(itertools.islice(ids_of_one_bucket(BUCKETS, bucket), 128))
    table = table_of(device_type, ids)
    assert standing_in_second(table, ids, bucket) == 64
    before = entries(table)
    table.reserve(table.num_slots)
    assert table.num_slots == 2 * 64 * BUCKETS
    assert entries(table) == before
    slots = table.find_slots(torch.tensor(ids, device=device_type)).tolist()
    check_buckets(table, dict(zip(ids, slots, strict=True)))


def test_all_buckets_at_once(device_type):
    """Two buckets take all ids of the bucket that splits, and all of its ids that are in the next
    bucket."""
    streams = [ids_of_one_bucket(BUCKETS, bucket) for bucket in range(BUCKETS)]
    ids = [next(stream) for _ in range(64 * 7 // 8) for stream in streams]
    table = table_of(device_type, ids)
    before = entries(table)
    for _ in range(3):
        slots = table.num_slots
        table.reserve(slots)
        assert table.num_slots == 2 * slots
        assert entries(table) == before
        found = table.find_slots(torch.tensor(ids, device=device_type)).tolist()
        assert len(set(found)) == len(ids)
        assert min(found) >= 0
        check_buckets(table, dict(zip(ids, found, strict=True)))


def test_more_than_are_moved_in_one_go(device_type):
    """A GPU lists such ids in rounds of 4,096."""
    buckets = 256
    table = make(device_type, 4 * 64 * buckets, 1, initial_capacity=64 * buckets)
    assert table.num_slots == 64 * buckets
    for bucket in range(0, buckets, 2):
        ids = list(itertools.islice(ids_of_one_bucket(buckets, bucket), 100))
        table.insert_or_assign(torch.tensor(ids, device=device_type),
                               torch.ones(len(ids), 1, device=device_type))  # fmt: skip
    before = entries(table)
    assert len(before) == buckets // 2 * 100
    table.reserve(table.num_slots)
    assert entries(table) == before
    slots = table.find_slots(torch.tensor(list(before), device=device_type)).tolist()
    assert min(slots) >= 0
