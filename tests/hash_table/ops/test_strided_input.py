"""Non-contiguous tensors give the same as contiguous copies, or are refused, and nothing
changes."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, make, random_rows

OPERATIONS = {
    "find_or_insert": ["ids", "scores"],
    "insert_or_assign": ["ids", "rows", "scores"],
    "insert_and_evict": ["ids", "rows", "scores"],
    "accum_or_assign": ["ids", "rows", "accumulate", "scores"],
    "assign": ["ids", "rows", "scores"],
    "assign_rows": ["ids", "rows"],
    "assign_scores": ["ids", "scores"],
    "erase": ["ids"],
}


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of the same values: strided, and by column."""
    views = [tensor.repeat_interleave(2, 0)[::2]]
    if tensor.dim() == 2:
        views += [tensor.T.contiguous().T, torch.cat([tensor, tensor], 1)[:, tensor.shape[1] :]]
    return views


@pytest.mark.parametrize("operation", OPERATIONS)
def test_views(device_type, operation):
    ids = distinct_ids(100, device_type)
    first = random_rows(make(device_type, dim=8), 50)
    arguments = {
        "ids": ids,
        "rows": random_rows(make(device_type, dim=8), 100),
        "accumulate": torch.arange(100, device=device_type) < 50,
        "scores": torch.arange(100, device=device_type),
    }
    plain = {name: arguments[name] for name in OPERATIONS[operation]}
    for name in plain:
        for view in strided(arguments[name]):
            assert not view.is_contiguous()
            expected, table = (make(device_type, 200, 8, eviction="lfu") for _ in range(2))
            for each in (expected, table):
                each.insert_or_assign(ids[:50], first)
            before = contents(table)
            getattr(expected, operation)(**plain)
            try:
                getattr(table, operation)(**{**plain, name: view})
            except ValueError as error:
                assert f"{name} must be contiguous" in str(error)  # noqa: PT017
                assert contents(table) == before, f"refused {name}, but changed the table"
            else:
                assert contents(table) == contents(expected), name


def test_find(device_type):
    table = make(device_type, 200, 8)
    ids = distinct_ids(100, device_type)
    rows = random_rows(table, 100)
    table.insert_or_assign(ids, rows)
    try:
        found_rows, found = table.find(strided(ids)[0])
    except ValueError as error:
        assert "ids must be contiguous" in str(error)  # noqa: PT017
    else:
        assert found.all()
        assert torch.equal(found_rows, rows)
