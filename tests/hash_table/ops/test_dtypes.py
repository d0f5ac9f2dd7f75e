"""Rows of fp32, fp16 and bf16 are stored and returned bit for bit."""

import pytest
import torch

from tests.support.tables import distinct_ids, expected_initial_rows, make, random_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 8, 130])
def test_round_trip(device_type, dtype, dim):
    table = make(device_type, 1000, dim, dtype=dtype)
    ids = distinct_ids(777, device_type)
    rows = random_rows(table, 777)
    table.insert_or_assign(ids, rows)
    found_rows, found = table.find(ids)
    assert found.all()
    assert found_rows.dtype == dtype
    assert torch.equal(bits(found_rows), bits(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_keep_their_bits(device_type, dtype):
    """Zeros of both signs, infinities, NaNs, the smallest and the largest numbers."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), smallest, -smallest]
    values += [info.max, info.min, info.smallest_normal]
    row = torch.tensor(values, dtype=dtype, device=device_type)
    table = make(device_type, dim=len(values), dtype=dtype)
    ids = distinct_ids(3, device_type)
    rows = torch.stack([row, row.flip(0), -row])
    for _ in range(2):  # an insertion, then an assignment
        table.insert_or_assign(ids, rows)
        assert torch.equal(bits(table.find(ids)[0]), bits(rows))
    table.assign_rows(ids, rows.flip(0))
    assert torch.equal(bits(table.find(ids)[0]), bits(rows.flip(0)))
    (entries,) = table.export()
    order = [ids.tolist().index(id_) for id_ in entries.ids.tolist()]
    assert torch.equal(bits(entries.rows), bits(rows.flip(0)[order]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 8, 130])
def test_initial_rows_are_rounded_to_the_nearest(device_type, dtype, dim):
    table = make(device_type, 1000, dim, dtype=dtype)
    ids = distinct_ids(777, device_type)
    expected = expected_initial_rows(table, ids)
    assert torch.equal(table.find(ids)[0], expected)
    assert torch.equal(table.find_or_insert(ids)[0], expected)
    assert torch.equal(table.find(ids)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evicted_rows(device_type, dtype):
    table = make(device_type, 64, dim=3, dtype=dtype)
    ids = distinct_ids(128, device_type)
    rows = random_rows(table, 64)
    table.insert_or_assign(ids[:64], rows)
    back = table.insert_and_evict(ids[64:], random_rows(table, 64))
    order = [ids.tolist().index(id_) for id_ in back.ids.tolist()]
    assert sorted(order) == list(range(64))
    assert torch.equal(bits(back.rows), bits(rows[order]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_table_takes_less_memory(device_type, dtype):
    sizes = [
        make(device_type, 1000, 64, dtype=kind)._group.hbm_bytes(0)
        + make(device_type, 1000, 64, dtype=kind)._group.host_bytes(0)
        for kind in (torch.float32, dtype)
    ]
    assert sizes[0] - sizes[1] >= 1000 * 64 * 2
