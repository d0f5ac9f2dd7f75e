"""Selects entries of a group by score, age, table and predicate."""

import pytest
import torch

from tests.support.table_observation import joined
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec


@pytest.fixture
def group(device_type):
    specs = [TableSpec(str(t), 100 + 50 * t, 1 + t, eviction="customized") for t in range(3)]
    group = TableGroup(specs, range(3), device=device_type)
    ids = torch.arange(60, device=device_type)
    offsets = torch.tensor([0, 10, 30, 60], device=device_type)
    rows = ids[:, None].float().repeat(1, 3)
    group.insert_or_assign(ids, offsets, 1, rows, ids)
    return group


def ids_by_table(parts):
    found = [[], [], []]
    for part in parts:
        for table, id_ in zip(part.tables.tolist(), part.ids.tolist(), strict=True):
            found[table].append(id_)
    return [sorted(ids) for ids in found]


def test_chosen_tables(group):
    exported = ids_by_table(group.export(batch_size=7, tables=[0, 2]))
    assert exported == [list(range(10)), [], list(range(30, 60))]
    exported = ids_by_table(group.export_if(tables=[1], score_at_least=25))
    assert exported == [[], list(range(25, 30)), []]
    assert group.erase_if(tables=[1, 2], score_below=40) == 30
    assert group.sizes() == [10, 0, 20]
    assert list(group.export(tables=[])) == []
    assert group.erase_if(tables=[], older_than=0) == 0


def test_a_predicate(group):
    def odd(entries):
        assert entries.ids.numel() <= 7
        assert entries.rows.shape == (entries.ids.numel(), 3)
        return entries.rows[:, 0] % 2 == 1

    exported = ids_by_table(group.export_if(where=odd, score_below=35, batch_size=7))
    assert exported == [[1, 3, 5, 7, 9], list(range(11, 30, 2)), [31, 33]]
    erased = group.erase_if(where=lambda entries: entries.rows[:, 0] % 2 == 1, score_below=35)
    assert erased == 17
    assert group.sizes() == [5, 10, 28]
    assert group.erase_if(where=lambda entries: entries.ids < 0) == 0


def test_a_predicate_on_one_table(device_type):
    table = HashTable(2, 64, device=device_type)
    ids = torch.arange(20, device=device_type)
    table.insert_or_assign(ids, torch.stack([ids, -ids], 1).float())
    assert table.erase_if(where=lambda entries: entries.rows[:, 1] < -14) == 5
    kept = joined(table.export_if(where=lambda entries: entries.rows[:, 0] >= 10, batch_size=3))
    assert sorted(kept.ids.tolist()) == [10, 11, 12, 13, 14]
    assert table.size == 15


@pytest.mark.parametrize(
    ("where", "error", "match"),
    [
        (lambda entries: [True], TypeError, "where must give a tensor of dtype torch.bool"),
        (lambda entries: entries.ids, TypeError, "but gave torch.int64"),
        (lambda entries: entries.ids[:1] >= 0, ValueError, r"where must give shape \(60,\)"),
    ],
)
def test_an_impossible_predicate(group, where, error, match):
    with pytest.raises(error, match=match):
        group.erase_if(where=where)
    assert group.sizes() == [10, 20, 30]


@pytest.mark.parametrize("tables", [[0, 3], [1, 1], [2, 0], [-1]])
def test_impossible_tables(group, tables):
    with pytest.raises(ValueError, match="tables must be ascending numbers from 0 to 2"):
        group.erase_if(tables=tables, older_than=0)
    assert group.sizes() == [10, 20, 30]
