"""erase_if removes entries by bounds of scores, and by age."""

import pytest

from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, contents, distinct_ids, make, scores_tensor

SCORES = [-(2**63), 1 - 2**63, -(2**32), -1, 0, 1, 7, 2**32 - 1, 2**63 - 2, 2**63 - 1]
BOUNDS = [None, -(2**63), -7, -1, 0, 1, 2**32, 2**63 - 1]


@pytest.mark.parametrize("below", BOUNDS)
@pytest.mark.parametrize("at_least", BOUNDS)
def test_score_bounds(device_type, below, at_least):
    table = make(device_type, 200, eviction="customized")
    ids = distinct_ids(150, device_type)
    scores = SCORES * 15
    table.find_or_insert(ids, scores_tensor(scores, device_type))
    meant = {
        id_
        for id_, score in zip(ids.tolist(), scores, strict=True)
        if (below is None or score < below) and (at_least is None or score >= at_least)
    }
    if below is None and at_least is None:
        at_least = -(2**63)
    assert table.erase_if(score_below=below, score_at_least=at_least) == len(meant)
    assert contents(table).keys() == set(ids.tolist()) - meant
    assert table.size == 150 - len(meant)


@pytest.mark.parametrize("policy", POLICIES)
def test_age(device_type, policy):
    """Older than n means untouched by the last n + 1 calls."""
    for older_than, left in [(0, 1), (1, 2), (2, 3), (8, 9), (9, 10), (10, 10), (2**40, 10)]:
        table = make(device_type, 200, eviction=policy)
        ids = distinct_ids(100, device_type)
        for part in ids.split(10):
            table.find_or_insert(part, constant_scores(table, 10))
        assert table.erase_if(older_than=older_than) == 100 - 10 * left
        assert contents(table).keys() == set(ids[100 - 10 * left :].tolist())


def test_a_touch_makes_young(device_type):
    table = make(device_type, 200, eviction="lfu")
    ids = distinct_ids(40, device_type)
    table.find_or_insert(ids)
    table.assign_scores(ids[:10])
    table.find_or_insert(ids[10:20])
    assert table.erase_if(older_than=1) == 20
    assert contents(table).keys() == set(ids[:20].tolist())


def test_all_conditions_must_hold(device_type):
    table = make(device_type, 200, eviction="customized")
    ids = distinct_ids(100, device_type)
    for turn, part in enumerate(ids.split(10)):
        table.find_or_insert(part, scores_tensor([turn * 10 + at for at in range(10)], device_type))
    # Scores 25 to 64, older than 4 calls: the first five parts, scores up to 49.
    assert table.erase_if(score_at_least=25, score_below=65, older_than=4) == 25
    assert contents(table).keys() == set(ids[:25].tolist()) | set(ids[50:].tolist())


def test_lru_scores_are_calls(device_type):
    table = make(device_type, 200)
    ids = distinct_ids(100, device_type)
    for part in ids.split(10):  # calls 1 to 10
        table.find_or_insert(part)
    assert table.erase_if(score_below=4, score_at_least=2) == 20
    assert contents(table).keys() == set(ids[:10].tolist()) | set(ids[30:].tolist())


def test_no_condition_is_refused(device_type):
    table = make(device_type, 200)
    table.find_or_insert(distinct_ids(100, device_type))
    for conditions in ({}, {"score_below": None, "where": None}):
        with pytest.raises(ValueError, match=r"no condition .* call clear\(\) to erase all"):
            table.erase_if(**conditions)
    with pytest.raises(ValueError, match=r"no condition .* call clear_table\(\) to erase all"):
        table.group.erase_if(tables=[0])
    assert table.size == 100
    assert table.erase_if(score_at_least=0) == 100
