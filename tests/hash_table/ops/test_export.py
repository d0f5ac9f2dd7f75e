"""export yields every entry once, in batches of bounded size."""

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import distinct_ids, make, random_rows


@pytest.mark.parametrize("batch_size", [1, 7, 250, 251, 252, 1 << 20])
def test_every_entry_once(device_type, batch_size):
    table = make(device_type, 400, dim=5, eviction="lfu", state_dim=2)
    ids = distinct_ids(251, device_type)
    rows = random_rows(table, 251)
    counts = torch.arange(251, device=device_type)
    table.insert_or_assign(ids, rows, counts)
    parts = list(table.export(batch_size))
    sizes = [part.ids.numel() for part in parts]
    assert sum(sizes) == 251
    assert max(sizes) <= batch_size
    assert len(parts) == -(-251 // batch_size)
    entries = joined(parts)
    position = {id_: at for at, id_ in enumerate(ids.tolist())}
    order = [position[id_] for id_ in entries.ids.tolist()]
    assert sorted(order) == list(range(251))
    assert torch.equal(entries.rows, rows[order])
    assert torch.equal(entries.scores, counts[order])
    assert torch.equal(entries.states, torch.zeros(251, 2, device=device_type))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_shapes(device_type, dtype):
    table = make(device_type, dim=3, dtype=dtype)
    table.find_or_insert(distinct_ids(10, device_type))
    (entries,) = table.export()
    assert entries.ids.dtype == entries.scores.dtype == torch.int64
    assert entries.rows.dtype == dtype
    assert entries.rows.shape == (10, 3)
    assert entries.states.dtype == torch.float32
    assert entries.states.shape == (10, 0)
    assert entries.rows.device == table.device


def test_an_empty_table(device_type):
    assert list(make(device_type).export()) == []


def test_a_copy(device_type):
    """Exported entries do not change with the table."""
    table = make(device_type)
    ids = distinct_ids(10, device_type)
    rows = random_rows(table, 10)
    table.insert_or_assign(ids, rows)
    (entries,) = table.export()
    kept = entries.rows.clone()
    table.assign_rows(ids, random_rows(table, 10))
    table.clear()
    assert torch.equal(entries.rows, kept)


def test_a_table_that_grows_meanwhile_raises(device_type):
    table = make(device_type, 10_000, initial_capacity=64)
    table.find_or_insert(distinct_ids(64, device_type))
    parts = table.export(10)
    next(parts)
    table.reserve(10_000)
    with pytest.raises(RuntimeError, match="A table has grown during an export"):
        next(parts)


def test_entries_that_were_given_may_be_erased(device_type):
    table = make(device_type, 400)
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids)
    given = []
    for part in table.export(7):
        given.append(part.ids)
        table.erase(part.ids)
    assert torch.cat(given).sort().values.equal(ids.sort().values)
    assert table.size == 0
