"""A table evicts nothing before it is 95 % full, whatever the pattern of the ids."""

import pytest
import torch

from tests.support.hashing import buckets_of
from tests.support.id_streams import STREAMS, id_stream
from tests.support.tables import make


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("capacity", [10_000, 65_536])
def test_first_eviction(device_type, stream, capacity):
    table = make(device_type, capacity, dim=1)
    ids = id_stream(stream, int(0.95 * table.capacity)).to(device_type)
    for part in ids.split(100):  # in larger batches, a GPU's threads decide which ids get a slot
        table.find_or_insert_slots(part)
    counters = table.counters()
    assert counters["evicted"] == counters["refused"] == 0
    assert table.size == len(ids)
    assert table.contains(ids).all()


@pytest.mark.parametrize("seed", range(20))
def test_who_evicts_finds_both_buckets_full(device_type, seed):
    """A call evicts only if both buckets are full, whatever the order of ids and threads."""
    buckets = 157
    table = make(device_type, 10_000, dim=1)
    assert table.capacity == buckets * 64
    torch.manual_seed(seed)
    rows = torch.zeros(1000, 1, device=device_type)
    slot_of: dict[int, int] = {}
    for part in id_stream("stride 2^20", 11_000).split(1000):
        ids = part[torch.randperm(1000)]
        back = table.insert_and_evict(ids.to(device_type), rows)
        slots = table.find_slots(ids.to(device_type)).tolist()
        if back.ids.numel():
            break
        slot_of.update(zip(ids.tolist(), slots, strict=True))
    assert len(slot_of) + 1000 - back.ids.numel() >= 0.95 * table.capacity
    holder = dict(zip(slots, ids.tolist(), strict=True))
    # Buckets only fill during a call, so those that it found full are full afterwards.
    there = torch.tensor([*{*slot_of.values()}, *holder.keys()])
    filled = torch.bincount(there.unique() // 64, minlength=buckets)
    for evicted in back.ids.tolist():
        evictor = holder[slot_of[evicted]]
        assert [int(filled[bucket]) for bucket in buckets_of(evictor, buckets)] == [64, 64]
