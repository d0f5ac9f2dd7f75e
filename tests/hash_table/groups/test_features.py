"""Ids are ordered by feature and bag; several features may share a table, and some tables have
none."""

import torch

from torchrec_hkv.hash_table import TableGroup, TableSpec


def make(device):
    specs = [TableSpec("a", 200, 2), TableSpec("b", 100, 3), TableSpec("c", 100, 1)]
    return TableGroup(specs, [1, 0, 1], device=device)


def test_features_share_a_table(device_type):
    group = make(device_type)
    # Two bags a feature; features 0 and 2, of one table, have id 7, and so does feature 1.
    ids = torch.tensor([7, 8, 7, 9, 7, 5], device=device_type)
    offsets = torch.tensor([0, 1, 2, 2, 4, 6, 6], device=device_type)
    rows = torch.arange(18.0, device=device_type).view(6, 3)
    rows[4] = rows[0]
    assert group.insert_or_assign(ids, offsets, 2, rows).all()
    assert group.sizes() == [2, 3, 0]
    found, there = group.find_rows(ids, offsets, 2)
    assert there.all()
    parts = group.split_rows(found, offsets, 2)
    assert [tuple(part.shape) for part in parts] == [(2, 3), (2, 2), (2, 3)]
    assert torch.equal(torch.cat([parts[0], parts[2]]), rows[[0, 1, 4, 5]])
    assert torch.equal(parts[1], rows[2:4, :2])
    assert not found[2:4, 2:].any()
    assert torch.equal(group.join_rows(parts), found)
    group.erase(ids[4:5], torch.tensor([0, 0, 0, 0, 0, 1, 1], device=device_type), 2)
    assert group.contains(ids, offsets, 2).tolist() == [False, True, True, True, False, True]


def test_one_table_through_two_features(device_type):
    group = TableGroup([TableSpec("a", 64, 2)], [0, 0], device=device_type)
    ids = torch.tensor([1, 2, 1, 3], device=device_type)
    offsets = torch.tensor([0, 2, 4], device=device_type)
    rows = torch.tensor([[1.0, 1], [2, 2], [1, 1], [3, 3]], device=device_type)
    group.insert_or_assign(ids, offsets, 1, rows)
    assert group.sizes() == [3]
    assert torch.equal(group.find_rows(ids, offsets, 1)[0], rows)
    group.accum_or_assign(ids, offsets, 1, rows, torch.ones(4, dtype=torch.bool).to(device_type))
    expected = torch.tensor([[3.0, 3], [4, 4], [3, 3], [6, 6]], device=device_type)
    assert torch.equal(group.find_rows(ids, offsets, 1)[0], expected)
    back = group.insert_and_evict(ids, offsets, 1, rows, trim=False)
    assert int(back.count) == 0
    assert back.tables.shape == back.ids.shape == (4,)


def test_rows_that_begin_anywhere(device_type):
    """Rows need not be aligned to the 16 bytes that a GPU reads at a time."""
    group = TableGroup([TableSpec("a", 64, 4), TableSpec("b", 64, 4)], [0, 1], device=device_type)
    one = TableGroup([TableSpec("a", 64, 4)], [0], device=device_type)
    rows = torch.arange(41.0, device=device_type)[1:].view(10, 4)
    ids = torch.arange(10, device=device_type)
    offsets = torch.tensor([0, 4, 10], device=device_type)
    group.insert_or_assign(ids, offsets, 1, rows)
    one.insert_or_assign(ids, None, 1, rows)
    assert torch.equal(group.find_rows(ids, offsets, 1)[0], rows)
    assert torch.equal(one.find_rows(ids, None, 1)[0], rows)
