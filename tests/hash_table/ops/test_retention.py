"""A table under a stream of new ids keeps nearly all of the newest or most frequent ids."""

import pytest
import torch

from tests.support.id_streams import id_stream
from tests.support.tables import distinct_ids, make

CAPACITY = 65_536
BATCH = 1024


@pytest.mark.parametrize("stream", ["sequential", "hashed", "stride 2^32"])
def test_customized_over_twelve_rounds(device_type, stream):
    """Scores rise with the ids. Each round keeps at least 0.96 of as many newest ids as the
    capacity."""
    table = make(device_type, CAPACITY, dim=1, eviction="customized")
    ids = id_stream(stream, 12 * CAPACITY).to(device_type)
    scores = torch.arange(12 * CAPACITY, device=device_type)
    for end in range(CAPACITY, 12 * CAPACITY + 1, CAPACITY):
        for at in range(end - CAPACITY, end, BATCH):
            table.find_or_insert_slots(ids[at : at + BATCH], scores[at : at + BATCH])
        newest = table.contains(ids[end - CAPACITY : end])
        assert newest.float().mean() >= 0.96
    assert table.load_factor >= 0.99


@pytest.mark.parametrize("stream", ["sequential", "hashed", "stride 2^32"])
def test_lru(device_type, stream):
    """Keeps at least 0.98 of as many newest ids as the capacity."""
    table = make(device_type, CAPACITY, dim=1)
    ids = id_stream(stream, 4 * CAPACITY).to(device_type)
    for end in range(CAPACITY, 4 * CAPACITY + 1, CAPACITY):
        for part in ids[end - CAPACITY : end].split(BATCH):
            table.find_or_insert_slots(part)
        assert table.contains(ids[end - CAPACITY : end]).float().mean() >= 0.98


@pytest.mark.parametrize("batch", [BATCH, 10_007])
def test_lfu(device_type, batch):
    """Each id comes with its count, in random order; the most frequent ids stay."""
    table = make(device_type, CAPACITY, dim=1, eviction="lfu")
    ids = distinct_ids(4 * CAPACITY, device_type)
    counts = torch.randperm(4 * CAPACITY).to(device_type)
    for some_ids, some_counts in zip(ids.split(batch), counts.split(batch), strict=True):
        table.find_or_insert_slots(some_ids, some_counts)
    frequent = ids[counts >= 3 * CAPACITY]
    assert table.contains(frequent).float().mean() >= 0.98
