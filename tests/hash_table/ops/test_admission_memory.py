"""Memory for counts of ids that are not admitted is announced and is part of the table's memory."""

import pytest

from torchrec_hkv.hash_table import (
    MinFrequency,
    Probability,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    table_memory,
)


@pytest.mark.parametrize(
    ("admission", "counts"),
    [
        (None, 0),
        (Probability(0.5), 0),
        (MinFrequency(2, entries=1), 8 * 16),
        (MinFrequency(2, entries=1000), 1000 * 16),
        (MinFrequency(2, entries=1001), 1008 * 16),
        (MinFrequency(2, sketch_bytes=16), 16),
        (MinFrequency(2, sketch_bytes=1000), 992),
        (MinFrequency(300, sketch_bytes=1 << 20), 1 << 20),
    ],
)
def test_announced_bytes_are_what_the_table_takes(device_type, admission, counts):
    plain = table_memory(1000, 4, 1, "lru")
    memory = table_memory(1000, 4, 1, "lru", admission=admission)
    assert memory.index_bytes == plain.index_bytes + counts
    spec = TableSpec("t", 1000, 4, admission=admission)
    other = TableSpec("u", 1000, 4)
    group = TableGroup([other, spec], [0, 1], RowWiseAdagrad(), device=device_type)
    for table, announced in ((0, plain), (1, memory)):
        taken = group.hbm_bytes(table), group.host_bytes(table)
        assert taken == ((announced.bytes, 0) if device_type == "cuda" else (0, announced.bytes))
