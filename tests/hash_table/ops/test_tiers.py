"""Tables with rows in HBM, in host memory or in both behave the same (on a CPU, all are in host
memory)."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, expected_initial_rows, make, random_rows

CAPACITY, DIM = 6400, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_all_operations(device_type, share, dtype):
    row_bytes = DIM * (4 if dtype == torch.float32 else 2) + 4 * 2
    index_bytes = CAPACITY * 24
    hbm_bytes = index_bytes + int(share * CAPACITY * row_bytes)
    table = make(device_type, CAPACITY, DIM, dtype=dtype, state_dim=2, hbm_bytes=hbm_bytes)
    if device_type == "cuda":
        assert table._group.hbm_bytes(0) <= hbm_bytes
        assert (table._group.host_bytes(0) > 0) == (share < 1)
    ids = distinct_ids(2 * CAPACITY, device_type)
    first = ids[:6000]
    rows = table.find_or_insert(first)[0]
    assert torch.equal(rows, expected_initial_rows(table, first))
    rows = random_rows(table, 6000)
    assert table.insert_or_assign(first, rows).all()
    assert torch.equal(table.find(first)[0], rows)
    rows = rows.flip(0)
    assert table.assign_rows(first, rows).all()
    more = random_rows(table, 6000)
    table.accum_or_assign(first, more, torch.ones(6000, dtype=torch.bool, device=device_type))
    rows = (rows.float() + more.float()).to(dtype)
    assert torch.equal(table.find(first)[0], rows)
    back = table.insert_and_evict(ids[CAPACITY:], random_rows(table, CAPACITY))
    kept = dict(zip(first.tolist(), map(tuple, rows.tolist()), strict=True))
    for id_, row in zip(back.ids.tolist(), map(tuple, back.rows.tolist()), strict=True):
        assert kept.get(id_, row) == row
    for id_, (row, _, state) in contents(table).items():
        assert kept.get(id_, row) == row
        assert state == (0.0, 0.0)
