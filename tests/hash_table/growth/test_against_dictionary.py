"""A table that grows under a stream of calls agrees with a dictionary."""

import pytest
import torch

from tests.support.growing_tables import slots_needed
from tests.support.tables import contents, distinct_ids, make, random_rows


@pytest.mark.parametrize(
    ("capacity", "initial"), [(5000, 1), (5000, 100), (3000, 1500), (3000, 2999), (700, 64)]
)
@pytest.mark.parametrize("dim", [1, 7, 32])
def test_stream(device_type, capacity, initial, dim):
    table = make(device_type, capacity, dim, initial_capacity=initial)
    slots = table.num_slots
    assert slots == slots_needed(capacity, initial, 0)
    pool = distinct_ids(int(0.95 * capacity), "cpu")
    known: dict[int, tuple[float, ...]] = {}
    maximum = 0
    for start in range(0, len(pool), 150):
        ids = torch.cat([pool[start : start + 150], pool[torch.randint(0, start + 1, (50,))]])
        ids = ids.unique()
        rows = random_rows(table, len(ids))
        assert table.insert_or_assign(ids.to(device_type), rows).all()
        known.update(zip(ids.tolist(), map(tuple, rows.tolist()), strict=True))
        maximum = max(maximum, len(known))
        removed = ids[torch.randperm(len(ids))[:20]]
        table.erase(removed.to(device_type))
        for id_ in removed.tolist():
            del known[id_]
        requested = pool[torch.randint(0, len(pool), (100,))]
        found_rows, found = table.find(requested.to(device_type))
        assert found.tolist() == [id_ in known for id_ in requested.tolist()]
        for id_, row, hit in zip(
            requested.tolist(), found_rows.tolist(), found.tolist(), strict=True
        ):
            assert not hit or tuple(row) == known[id_]
        # It grows only when necessary.
        assert table.num_slots <= slots_needed(capacity, initial, maximum)
        assert table.num_slots >= slots_needed(capacity, initial, len(known))
    assert {id_: row for id_, (row, _, _) in contents(table).items()} == known
    assert table.num_slots > slots or slots == table.capacity
    assert table.counters()["evicted"] == table.counters()["refused"] == 0


def test_scores_follow(device_type):
    """Growth keeps the counts of ids."""
    table = make(device_type, 4000, eviction="lfu", initial_capacity=60)
    pool = distinct_ids(1500, device_type)
    counts = dict.fromkeys(pool.tolist(), 0)
    for _ in range(40):
        ids = pool[torch.randint(0, len(pool), (100,), device=device_type)]
        table.find_or_insert(ids)
        for id_ in ids.tolist():
            counts[id_] += 1
    scores = {id_: score for id_, (_, score, _) in contents(table).items()}
    assert scores == {id_: count for id_, count in counts.items() if count}
