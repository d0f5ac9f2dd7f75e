"""``insert_and_evict`` gives back entries that a table evicts when buckets are full before it
grows.

For this, both hashes of all ids give one bucket, so that they share two buckets.
"""

import itertools

import torch

from tests.support.growing_tables import ids_of_one_bucket
from tests.support.tables import contents, make, random_rows

BUCKETS = 4


def test_nothing_is_lost(device_type):
    table = make(device_type, 32 * 64, 3, initial_capacity=64 * BUCKETS)
    ids = torch.tensor(list(itertools.islice(ids_of_one_bucket(BUCKETS, 1), 200)))
    ids = ids.to(device_type)
    rows = random_rows(table, 200)
    given = dict(zip(ids.tolist(), map(tuple, rows.tolist()), strict=True))
    outside = {}
    for part in (slice(0, 150), slice(150, 200)):
        back = table.insert_and_evict(ids[part], rows[part])
        assert table.num_slots == 64 * BUCKETS
        for id_ in ids[part].tolist():
            outside.pop(id_, None)
        outside |= dict(zip(back.ids.tolist(), map(tuple, back.rows.tolist()), strict=True))
    inside = {id_: row for id_, (row, _, _) in contents(table).items()}
    assert len(inside) == 128
    assert len(outside) == 72
    assert inside | outside == given
    counters = table.counters()
    assert (counters["evicted"], counters["refused"]) == (50, 22)
