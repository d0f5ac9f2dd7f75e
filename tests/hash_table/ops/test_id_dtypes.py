"""All calls take ids of any integer dtype of 8 to 64 bits, and refuse other dtypes."""

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import contents, make, random_rows
from torchrec_hkv.hash_table import TableGroup, TableSpec, initial_rows

INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
OTHERS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64]


def values_of(dtype: torch.dtype) -> list[int]:
    """The extreme ids of a dtype, as int64."""
    info = torch.iinfo(dtype)
    maximum = min(info.max, 2**63 - 1)
    values = [0, 1, 5, maximum - 1, maximum, info.min]
    if dtype == torch.uint64:
        values += [-1, -(2**63)]  # 2^64 - 1 and 2^63
    return sorted({*values})


def given(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a dtype, and their int64 values."""
    plain = torch.tensor(values_of(dtype), dtype=torch.int64)
    ids = plain.view(dtype) if dtype == torch.uint64 else plain.to(dtype)
    return ids.to(device), plain.to(device)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_calls_take(device_type, dtype):
    table = make(device_type, 64, dim=3, initializer=None)
    ids, plain = given(dtype, device_type)
    n = len(ids)
    rows = random_rows(table, n)
    missing, positions = table.find_missing(ids)
    assert missing.dtype == dtype
    assert positions.tolist() == [*range(n)]
    assert not table.find(ids)[1].any()
    assert not table.find_or_insert(ids[:2])[1].any()
    assert table.insert_or_assign(ids, rows).all()
    assert torch.equal(joined(table.export()).ids.sort().values, plain.sort().values)
    assert torch.equal(table.find(plain)[0], rows)
    assert torch.equal(table.find(ids)[0], rows)
    assert torch.equal(table.find_slots(ids), table.find_slots(plain))
    assert table.contains(ids).all()
    assert table.find_or_insert_slots(ids)[1].all()
    assert table.assign(ids, 2 * rows).all()
    table.accum_or_assign(ids, rows, torch.ones(n, dtype=torch.bool, device=device_type))
    assert torch.equal(table.find(plain)[0], 3 * rows)
    assert table.assign_rows(ids, rows).all()
    assert table.assign_scores(ids).all()
    assert len(table.insert_and_evict(ids, rows).ids) == 0
    table.erase(ids)
    assert table.size == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_group_takes(device_type, dtype):
    group = TableGroup([TableSpec("a", 64, 2), TableSpec("b", 64, 2)], [0, 1], device=device_type)
    ids, plain = given(dtype, device_type)
    offsets = torch.tensor([0, 2, len(ids)], device=device_type)
    slots = group.find_or_insert(ids, offsets, 1)
    assert torch.equal(group.find(plain, offsets, 1), slots)
    assert torch.equal(group.find(ids, offsets, 1), slots)
    rate = torch.tensor(0.0, device=device_type)
    anchor = torch.empty(0, device=device_type)
    pooled = group.pooled_lookup(anchor, ids, offsets, None, slots, 1, False, None, rate)
    assert pooled.shape == (1, 4)


@pytest.mark.parametrize("dtype", OTHERS)
def test_calls_refuse(device_type, dtype):
    table = make(device_type, 64, dim=3)
    ids = torch.arange(4, device=device_type).to(dtype)
    before = contents(table)
    match = rf"ids must be a tensor of integers of 8 to 64 bits, but is {dtype}\."
    rows = random_rows(table, 4)
    offsets = torch.tensor([0, 4], device=device_type)
    for call in (
        lambda: table.find(ids),
        lambda: table.find_missing(ids),
        lambda: table.find_or_insert(ids),
        lambda: table.insert_or_assign(ids, rows),
        lambda: table.assign_rows(ids, rows),
        lambda: table.erase(ids),
        lambda: table.group.find(ids, offsets, 1),
        lambda: table.group.find_or_insert(ids, offsets, 1),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    assert contents(table) == before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_initial_rows_take(device_type, dtype):
    ids, plain = given(dtype, device_type)
    table = make(device_type, 64, dim=3)
    expected = table.find(plain)[0]
    assert torch.equal(table.find(ids)[0], expected)
    assert initial_rows(ids, 3, table="table", initializer=None).shape == (len(ids), 3)
