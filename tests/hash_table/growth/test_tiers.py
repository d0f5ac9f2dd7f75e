"""Growth is the same with rows in HBM, in host memory, or in both."""

import pytest
import torch

from tests.support.saved_tables import entries, filled, like
from tests.support.tables import distinct_ids, expected_initial_rows, make
from torchrec_hkv.hash_table import table_memory

CAPACITY, INITIAL, DIM = 6400, 800, 6


@pytest.mark.parametrize("share", [0.0, 0.05, 0.125, 0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_splits(device_type, share, dtype):
    memory = table_memory(CAPACITY, DIM, 2, "lru", dtype.itemsize, initial_capacity=INITIAL)
    hbm_bytes = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
    hbm_bytes = max(hbm_bytes, memory.least_hbm_bytes)
    options = {"dim": DIM, "dtype": dtype, "state_dim": 2, "initial_capacity": INITIAL}
    table = filled(device_type, 600, CAPACITY, hbm_bytes=hbm_bytes, **options)
    before = entries(table)
    while table.num_slots < table.capacity:
        table.reserve(min(table.capacity, table.num_slots))
        assert entries(table) == before
    # New slots get new rows, trained and untrained.
    ids = distinct_ids(4000, device_type)
    rows, _ = table.find_or_insert(ids)
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert torch.equal(table.find(ids)[0], rows)
    after = entries(table)
    assert all(after[id_] == entry for id_, entry in before.items())


def test_a_table_in_one_memory_holds_the_same(device_type, tmp_path):
    memory = table_memory(CAPACITY, DIM, 0, "lru", initial_capacity=INITIAL)
    hbm_bytes = memory.index_bytes + memory.num_slots * memory.row_bytes // 3
    ids = distinct_ids(5400, device_type)  # few enough ids that each finds a slot
    tables = [
        make(device_type, CAPACITY, DIM, initial_capacity=INITIAL, hbm_bytes=limit)
        for limit in (hbm_bytes, None)
    ]
    for part in ids.split(700):
        rows = [table.find_or_insert(part)[0] for table in tables]
        assert torch.equal(*rows)
    tables[0].save(tmp_path)
    again = like(tables[1])
    assert again.load(tmp_path) == 0
    assert entries(again) == entries(tables[0]) == entries(tables[1])
