"""Nothing leaves a table before it is 95 % full, whatever the pattern of the ids."""

import pytest

from tests.support.id_streams import STREAMS, id_stream
from tests.support.tables import make


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("capacity", [10_000, 65_536])
def test_first_eviction(device_type, stream, capacity):
    table = make(device_type, capacity, dim=1)
    ids = id_stream(stream, int(0.95 * table.capacity)).to(device_type)
    for part in ids.split(1000):
        table.find_or_insert_slots(part)
    counters = table.counters()
    assert counters["evicted"] == counters["refused"] == 0
    assert table.size == len(ids)
    assert table.contains(ids).all()
