"""export_if yields entries by bounds of scores and by age, and changes nothing."""

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import contents, distinct_ids, make, random_rows, scores_tensor

SCORES = [-(2**63), 1 - 2**63, -(2**32), -1, 0, 1, 7, 2**32 - 1, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("below", [None, -(2**63), -1, 0, 7, 2**63 - 1])
@pytest.mark.parametrize("at_least", [None, -(2**63), -1, 0, 7, 2**63 - 1])
def test_score_bounds(device_type, below, at_least):
    table = make(device_type, 200, dim=3, eviction="customized")
    ids = distinct_ids(150, device_type)
    rows = random_rows(table, 150)
    scores = SCORES * 15
    table.insert_or_assign(ids, rows, scores_tensor(scores, device_type))
    before = contents(table)
    meant = [
        at
        for at, score in enumerate(scores)
        if (below is None or score < below) and (at_least is None or score >= at_least)
    ]
    entries = joined(table.export_if(score_below=below, score_at_least=at_least, batch_size=16))
    assert contents(table) == before
    if entries is None:
        assert not meant
        return
    position = {id_: at for at, id_ in enumerate(ids.tolist())}
    order = [position[id_] for id_ in entries.ids.tolist()]
    assert sorted(order) == meant
    assert torch.equal(entries.rows, rows[order])
    assert entries.scores.tolist() == [scores[at] for at in order]


def test_age(device_type):
    table = make(device_type, 200)
    ids = distinct_ids(100, device_type)
    for part in ids.split(10):
        table.find_or_insert(part)
    entries = joined(table.export_if(older_than=6))
    assert set(entries.ids.tolist()) == set(ids[:30].tolist())
    entries = joined(table.export_if(older_than=6, score_at_least=3))
    assert set(entries.ids.tolist()) == set(ids[20:30].tolist())


def test_nothing_meets_the_conditions(device_type):
    table = make(device_type)
    table.find_or_insert(distinct_ids(20, device_type))
    assert list(table.export_if(older_than=1)) == []
