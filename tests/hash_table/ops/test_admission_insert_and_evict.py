"""insert_and_evict gives back ids that are not admitted, like refused ones."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, make, random_rows
from torchrec_hkv.hash_table import MinFrequency, Probability


@pytest.mark.parametrize(
    "admission",
    [MinFrequency(3, entries=4096), MinFrequency(3, sketch_bytes=1 << 14), Probability(0.4)],
    ids=["cells", "sketch", "probability"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_lost(device_type, admission, dtype):
    """The table and the returned entries together equal the previous table and the input."""
    table = make(device_type, 64, dim=3, dtype=dtype, eviction="lfu", admission=admission)
    pool = distinct_ids(200, device_type)
    unadmitted = 0
    for _ in range(12):
        before = {id_: (row, score) for id_, (row, score, _) in contents(table).items()}
        ids = pool[torch.randperm(200)[:50]]
        rows, scores = random_rows(table, 50), torch.randint(1, 9, (50,)).to(device_type)
        back = table.insert_and_evict(ids, rows, scores)
        given = {
            id_: (tuple(row), score)
            for id_, row, score in zip(ids.tolist(), rows.tolist(), scores.tolist(), strict=True)
        }
        after = {id_: (row, score) for id_, (row, score, _) in contents(table).items()}
        returned = dict(
            zip(
                back.ids.tolist(),
                zip(map(tuple, back.rows.tolist()), back.scores.tolist(), strict=True),
                strict=True,
            )
        )
        assert len(returned) == back.ids.numel()
        assert not returned.keys() & after.keys()
        assert returned.keys() | after.keys() == before.keys() | given.keys()
        for id_, entry in returned.items():
            assert entry == (before[id_] if id_ in before else given[id_])
        unadmitted += sum(id_ in given for id_ in returned)
    counters = table.counters()
    assert counters["unadmitted"] > 0
    assert counters["unadmitted"] + counters["refused"] == unadmitted


def test_all_occurrences_come_back(device_type):
    table = make(device_type, 64, admission=MinFrequency(4, entries=64))
    one, other = distinct_ids(2, device_type).tolist()
    ids = torch.tensor([one, other, one, other, one], device=device_type)
    rows = random_rows(table, 5)
    back = table.insert_and_evict(ids, rows)
    assert sorted(back.ids.tolist()) == sorted(ids.tolist())
    assert sorted(back.rows.tolist()) == sorted(rows.tolist())
