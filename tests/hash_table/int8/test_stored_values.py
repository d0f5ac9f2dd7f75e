"""An int8 row stores, in every column, the nearest multiple of 1/127 of its largest magnitude."""

import pytest
import torch

from tests.support.int8_rows import rounded
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import Constant, Normal, TableGroup, TableSpec, Uniform, initial_rows

#: Words of four columns, whole and in part; blocks of a CPU, whole and in part; several
#: steps of a warp.
DIMS = [1, 3, 4, 7, 8, 16, 17, 31, 64, 128, 132, 260, 2048]


def assert_same_bits(rows, expected):
    torch.testing.assert_close(rows.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("initializer", [Uniform(-0.3, 0.1), Constant(0.7), None], ids=str)
def test_initial_rows(device_type, dim, initializer):
    table = make(device_type, 300, dim, dtype=torch.int8, initializer=initializer, name="t", seed=3)
    ids = distinct_ids(200, device_type)
    exact = initial_rows(ids, dim, table="t", seed=3, initializer=initializer)
    expected = rounded(exact)
    missing, found = table.find(ids)
    assert not found.any()
    assert_same_bits(missing, expected)
    inserted, _ = table.find_or_insert(ids)
    assert_same_bits(inserted, expected)
    assert_same_bits(table.find(ids)[0], expected)
    if initializer is not None:
        assert (inserted.cpu() - exact.cpu()).abs().max() <= 0.5001 * exact.abs().max().cpu() / 127


def test_normal_initial_rows(device_type):
    table = make(device_type, 300, 24, dtype=torch.int8, initializer=Normal(0, 1), name="t", seed=3)
    ids = distinct_ids(200, device_type)
    exact = initial_rows(ids, 24, table="t", seed=3, initializer=Normal(0, 1)).cpu()
    rows, _ = table.find_or_insert(ids)
    scales = exact.abs().amax(1, keepdim=True) / 127
    assert ((rows.cpu() - exact).abs() <= 0.501 * scales).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("call", ["insert_or_assign", "assign", "assign_rows"])
def test_given_rows(device_type, dim, call):
    table = make(device_type, 300, dim, dtype=torch.int8)
    ids = distinct_ids(200, device_type)
    if call != "insert_or_assign":
        table.find_or_insert(ids)
    rows = torch.randn(200, dim) * torch.logspace(-20, 20, 200)[:, None]
    assert getattr(table, call)(ids, rows.to(device_type)).all()
    assert_same_bits(table.find(ids)[0], rounded(rows))
    (entries,) = table.export()
    order = entries.ids.cpu().argsort()
    assert entries.rows.dtype == torch.float32
    assert_same_bits(entries.rows[order.to(device_type)], rounded(rows)[ids.cpu().argsort()])


def test_rows_added_one_after_the_other(device_type):
    """Each sum is rounded, so the order within a call counts."""
    table = make(device_type, 300, 37, dtype=torch.int8, initializer=Uniform(-1, 1))
    ids = distinct_ids(50, device_type)
    before, _ = table.find_or_insert(ids)
    expected = before.cpu()
    for _ in range(3):
        rows = torch.randn(50, 37)
        which = torch.ones(50, dtype=torch.bool, device=device_type)
        table.accum_or_assign(ids, rows.to(device_type), which)
        expected = rounded(expected + rows)
    assert_same_bits(table.find(ids)[0], expected)
    rows = torch.randn(3, 37)
    which = torch.ones(3, dtype=torch.bool, device=device_type)
    table.accum_or_assign(ids[:1].expand(3), rows.to(device_type), which)
    for row in rows:
        expected[:1] = rounded(expected[:1] + row)
    assert_same_bits(table.find(ids[:1])[0], expected[:1])


@pytest.mark.parametrize("dim", [5, 16, 40])
def test_special_values(device_type, dim):
    """Zeros stay zero, tiny rows become zero, and a NaN or infinity makes the whole row NaN."""
    rows = torch.randn(6, dim)
    rows[0], rows[1], rows[2] = 0.0, 2.0**-120, torch.finfo().max
    rows[3, -1], rows[4, 0] = float("nan"), float("-inf")
    table = make(device_type, 100, dim, dtype=torch.int8)
    ids = distinct_ids(6, device_type)
    table.insert_or_assign(ids, rows.to(device_type))
    found = table.find(ids)[0].cpu()
    assert_same_bits(found, rounded(rows))
    assert (found[:2] == 0).all()
    assert found[3:5].isnan().all()
    assert found[[2, 5]].isfinite().all()


def test_what_leaves_is_given_back_as_it_was(device_type):
    table = make(device_type, 64, 9, dtype=torch.int8)
    ids, rows = distinct_ids(640, device_type), torch.randn(640, 9)
    stored = dict(zip(ids.tolist(), rounded(rows), strict=True))
    left = 0
    for part in torch.arange(640).split(64):
        evicted = table.insert_and_evict(ids[part], rows[part].to(device_type))
        for id_, row in zip(evicted.ids.tolist(), evicted.rows.cpu(), strict=True):
            assert torch.equal(row, stored[id_]) or torch.equal(row, rows[ids.tolist().index(id_)])
        left += len(evicted.ids)
    assert left >= 500


def test_beside_tables_of_other_dtypes(device_type):
    """Tables of one group differ in dtype; rows of calls are float32."""
    specs = [
        TableSpec("a", 200, 12, initializer=Uniform(-1, 1), dtype=torch.int8),
        TableSpec("b", 200, 20, initializer=Uniform(-1, 1)),
        TableSpec("c", 200, 7, initializer=Uniform(-1, 1), dtype=torch.bfloat16),
    ]
    group = TableGroup(specs, [0, 1, 2], None, device_type)
    ids = distinct_ids(90, device_type)
    offsets = torch.tensor([0, 30, 60, 90], device=device_type)
    assert group.row_dtype == torch.float32
    found, _ = group.find_or_insert_rows(ids, offsets, 1)
    for again in (found, group.find_rows(ids, offsets, 1)[0]):
        for feature, spec in enumerate(specs):
            its = slice(30 * feature, 30 * (feature + 1))
            exact = initial_rows(ids[its], spec.dim, table=spec.name, initializer=Uniform(-1, 1))
            want = rounded(exact) if spec.dtype == torch.int8 else exact.cpu().to(spec.dtype)
            assert torch.equal(again[its, : spec.dim].cpu(), want.float())
    rows = [torch.randn(30, spec.dim).to(device_type) for spec in specs]
    group.assign(ids, offsets, 1, group.join_rows(rows))
    parts = group.split_rows(group.find_rows(ids, offsets, 1)[0], offsets, 1)
    assert torch.equal(parts[0].cpu(), rounded(rows[0]))
    assert torch.equal(parts[1], rows[1])
    assert torch.equal(parts[2], rows[2].bfloat16())
