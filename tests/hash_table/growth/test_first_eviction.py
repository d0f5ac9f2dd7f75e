"""A growing table evicts nothing before it holds 95 % of its full capacity."""

import pytest

from tests.support.id_streams import STREAMS, id_stream
from tests.support.tables import make


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("batch", [90, 1000, 8000])
def test_first_eviction(device_type, stream, batch):
    """Large batches insert in order; otherwise a GPU's threads decide which ids get a slot."""
    in_order = batch >= 1000
    table = make(device_type, 10_000, dim=1, initial_capacity=64, deterministic=in_order)
    assert table.num_slots < 400
    ids = id_stream(stream, int(0.95 * table.capacity)).to(device_type)
    for part in ids.split(batch):
        table.find_or_insert_slots(part)
        assert table.size <= table.num_slots
    counters = table.counters()
    assert counters["evicted"] == counters["refused"] == 0
    assert table.num_slots == table.capacity
    assert table.size == len(ids)
    assert table.contains(ids).all()


def test_then_it_evicts(device_type):
    table = make(device_type, 1000, dim=1, initial_capacity=64)
    ids = id_stream("hashed", 3000).to(device_type)
    for part in ids.split(100):
        table.find_or_insert_slots(part)
    assert table.num_slots == table.capacity
    assert table.size >= 0.99 * table.capacity
    assert table.counters()["evicted"] == 3000 - table.size
