"""An export yields the entries of its beginning, or raises if one of them has left."""

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import make, random_rows


@pytest.fixture
def table(device_type):
    table = make(device_type, 128, dim=3)
    table.insert_or_assign(torch.arange(100, device=device_type), random_rows(table, 100))
    return table


def test_an_entry_to_come_is_erased(table):
    parts = table.export(batch_size=10)
    given = next(parts).ids
    table.erase(given)  # entries already yielded may leave
    given = next(parts).ids
    ids = torch.arange(100, device=table.device)
    left = ids[table.contains(ids)]
    coming = left[~torch.isin(left, given)]
    table.erase(coming[:3])
    with pytest.raises(RuntimeError, match="left the table during an export before"):
        list(parts)


def test_an_entry_to_come_is_replaced(table):
    """If another id takes the slot of an entry that is still to come, neither is yielded."""
    parts = table.export(batch_size=10)
    next(parts)
    table.insert_or_assign(torch.arange(1000, 1120, device=table.device), random_rows(table, 120))
    with pytest.raises(RuntimeError, match="left the table during an export before"):
        list(parts)


def test_entries_that_arrive_are_not_given(table):
    parts = table.export(batch_size=10)
    first = next(parts)
    table.insert_or_assign(torch.arange(500, 510, device=table.device), random_rows(table, 10))
    entries = joined([first, *parts])
    assert torch.equal(entries.ids.sort().values.cpu(), torch.arange(100))


def test_a_predicate_must_not_change_the_table(table):
    def erases(entries):
        table.erase(entries.ids)
        return entries.ids >= 0

    with pytest.raises(RuntimeError, match="by the thread that is saving or exporting it"):
        list(table.export_if(where=erases))
    assert table.size == 100


def test_an_export_that_is_dropped_holds_nothing(table):
    next(table.export(batch_size=10))
    table.clear()
    assert table.size == 0
