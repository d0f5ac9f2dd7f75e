"""insert_and_evict gives back evicted and refused entries: nothing is lost."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import (
    constant_scores,
    contents,
    distinct_ids,
    make,
    random_rows,
    scores_tensor,
)


def given_back(evicted) -> dict[int, tuple[tuple[float, ...], int]]:
    ids = evicted.ids.tolist()
    assert len(set(ids)) == len(ids)
    rows = [tuple(row) for row in evicted.rows.tolist()]
    scores = evicted.scores.tolist()
    return dict(zip(ids, zip(rows, scores, strict=True), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [64, 1000])
def test_nothing_is_lost(device_type, policy, capacity):
    """After each call, the table and the returned entries together equal the previous table and the
    input."""
    table = make(device_type, capacity, dim=3, eviction=policy)
    ids = distinct_ids(4 * capacity, device_type)
    expected: dict[int, tuple[float, ...]] = {}
    for part in ids.split(capacity // 3 + 1):
        before = {id_: (row, score) for id_, (row, score, _) in contents(table).items()}
        rows = random_rows(table, len(part))
        scores = constant_scores(table, len(part))
        back = given_back(table.insert_and_evict(part, rows, scores))
        expected = {id_: row for id_, (row, _) in before.items()}
        expected |= dict(zip(part.tolist(), map(tuple, rows.tolist()), strict=True))
        after = {id_: row for id_, (row, _, _) in contents(table).items()}
        assert not after.keys() & back.keys()
        assert {**after, **{id_: row for id_, (row, _) in back.items()}} == expected
        for id_ in before.keys() & back.keys():
            assert back[id_] == before[id_]
    assert table.size > 0.9 * capacity
    assert table.counters()["evicted"] > 0


def test_refused_ids_come_back_with_their_rows_and_scores(device_type):
    table = make(device_type, 64, eviction="customized")
    ids = distinct_ids(100, device_type)
    first = random_rows(table, 64)
    high = scores_tensor(list(range(64)), device_type)
    assert len(table.insert_and_evict(ids[:64], first, high).ids) == 0
    rows = random_rows(table, 36)
    low = scores_tensor([-1 - at for at in range(36)], device_type)
    back = given_back(table.insert_and_evict(ids[64:], rows, low))
    expected = zip(map(tuple, rows.tolist()), [-1 - at for at in range(36)], strict=True)
    assert back == dict(zip(ids[64:].tolist(), expected, strict=True))
    assert contents(table).keys() == set(ids[:64].tolist())
    assert table.counters()["refused"] == 36


def test_a_call_larger_than_the_table(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(200, device_type)
    rows = random_rows(table, 200)
    back = given_back(table.insert_and_evict(ids, rows))
    assert len(back) == 136
    everything = {id_: row for id_, (row, _) in back.items()}
    everything |= {id_: row for id_, (row, _, _) in contents(table).items()}
    assert everything == dict(zip(ids.tolist(), map(tuple, rows.tolist()), strict=True))


def test_a_hit_is_not_given_back(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(64, device_type)
    table.insert_or_assign(ids, random_rows(table, 64))
    rows = random_rows(table, 64)
    assert len(table.insert_and_evict(ids, rows).ids) == 0
    assert torch.equal(table.find(ids)[0], rows)


def test_an_empty_call(device_type):
    table = make(device_type)
    back = table.insert_and_evict(distinct_ids(0, device_type), random_rows(table, 0))
    assert back.ids.shape == back.scores.shape == (0,)
    assert back.rows.shape == (0, 4)


def test_dtypes_and_shapes(device_type):
    table = make(device_type, 64, dim=5, dtype=torch.bfloat16)
    ids = distinct_ids(70, device_type)
    table.insert_or_assign(ids[:64], random_rows(table, 64))
    back = table.insert_and_evict(ids[64:], random_rows(table, 6))
    assert back.ids.dtype == back.scores.dtype == torch.int64
    assert back.rows.dtype == torch.bfloat16
    assert back.rows.shape == (6, 5)
    assert back.ids.shape == back.scores.shape == (6,)


def test_untrimmed(device_type):
    """Untrimmed results have the input's length, the same entries, and their number on the
    device."""
    trimmed, padded = (make(device_type, 64, dim=3, eviction="customized") for _ in range(2))
    ids = distinct_ids(64 + 50, device_type)
    rows = random_rows(trimmed, len(ids))
    scores = scores_tensor(list(range(len(ids))), device_type)  # scores decide which entries leave
    for table in (trimmed, padded):
        table.insert_or_assign(ids[:64], rows[:64], scores[:64])
    expected = trimmed.insert_and_evict(ids[64:], rows[64:], scores[64:])
    back = padded.insert_and_evict(ids[64:], rows[64:], scores[64:], trim=False)
    assert back.ids.shape == back.scores.shape == (50,)
    assert back.rows.shape == (50, 3)
    assert back.count.device == ids.device
    assert back.count.tolist() == expected.count.tolist() == [50]
    assert given_back(back) == given_back(expected)
    again = padded.insert_and_evict(ids[64:], rows[64:], scores[64:], trim=False)
    assert again.ids.shape == (50,)
    assert again.count.tolist() == [0]


def test_nothing_is_given_back_where_all_ids_are_there(device_type):
    table = make(device_type)
    ids = distinct_ids(20, device_type)
    for n in (20, 20, 5, 1, 0):
        back = table.insert_and_evict(ids[:n], random_rows(table, n))
        assert back.ids.numel() == back.rows.numel() == 0
    assert table.size == 20
