"""Entries untouched for too many calls leave when their bucket has its turn."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, expected_initial_rows, make, random_rows
from torchrec_hkv.hash_table import HashTable


def idle(table: HashTable, calls: int) -> None:
    """Makes calls that touch nothing."""
    for _ in range(calls):
        table.find_or_insert(torch.empty(0, dtype=torch.int64, device=table.device))


@pytest.mark.parametrize("expire_after", [1, 2, 5, 63, 64, 65, 100])
@pytest.mark.parametrize("capacity", [50, 10_000])
def test_leaves_within_a_turn(device_type, expire_after, capacity):
    """With one bucket, or more buckets than a turn has calls, no entry leaves too early or too
    late."""
    table = make(device_type, capacity, expire_after=expire_after)
    ids = distinct_ids(capacity // 2, device_type)
    turn = min(64, expire_after)
    table.find_or_insert(ids)
    idle(table, expire_after)
    assert table.contains(ids).all()
    sizes = []
    for _ in range(turn):
        idle(table, 1)
        sizes.append(table.size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert table.counters()["expired"] == len(ids)
    assert table.counters()["evicted"] == 0
    if capacity > 64 * turn > 64:
        assert len(set(sizes)) > turn // 2  # spread over the turn


def test_a_touch_starts_the_age_anew(device_type):
    table = make(device_type, 300, expire_after=3)
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids)
    for call in (
        lambda part: table.find_or_insert(part),
        lambda part: table.assign_scores(part),
        lambda part: table.assign(part, random_rows(table, len(part))),
        lambda part: table.insert_or_assign(part, random_rows(table, len(part))),
    ) * 5:
        table.find(ids)
        table.assign_rows(ids, random_rows(table, len(ids)))  # does not touch
        call(ids[:40])
    assert table.contains(ids).tolist() == [True] * 40 + [False] * 60
    assert table.counters()["expired"] == 60


def test_every_bucket_has_its_turn_whatever_calls_come(device_type):
    """Calls of two kinds alternate; each scans its share of the buckets."""
    table = make(device_type, 64 * 40, expire_after=8)
    ids = distinct_ids(500, device_type)
    table.find_or_insert(ids)
    for _ in range(8):
        table.assign_scores(ids[:1])
        table.find_or_insert(ids[:1])
    assert table.size == 1


def test_expired_before_the_call_looks(device_type):
    """An id that expires in the call that looks it up starts again as a new one, with zero
    state."""
    table = make(device_type, 64, expire_after=1, state_dim=2)
    ids = distinct_ids(10, device_type)
    table.insert_or_assign(ids, torch.full((10, 4), 7.0, device=device_type))
    idle(table, 1)
    rows, found = table.find_or_insert(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert table.counters()["expired"] == 10
    assert all(state == (0.0, 0.0) for _, _, state in contents(table).values())
    assert table.find_or_insert(ids)[1].all()


@pytest.mark.parametrize("call", ["assign", "accum_or_assign"])
def test_nothing_is_written_to_what_expires_in_the_call(device_type, call):
    table = make(device_type, 64, expire_after=1)
    ids = distinct_ids(10, device_type)
    rows = torch.full((10, 4), 7.0, device=device_type)
    table.insert_or_assign(ids, rows)
    idle(table, 1)
    if call == "assign":
        assert not table.assign(ids, rows).any()
    else:
        table.accum_or_assign(ids, rows, torch.ones(10, dtype=torch.bool, device=device_type))
    assert table.size == 0


def test_evicted_rather_than_expired_where_there_is_no_room(device_type):
    table = make(device_type, 64, expire_after=1000)
    ids = distinct_ids(128, device_type)
    table.find_or_insert(ids[:64])
    table.find_or_insert(ids[64:])
    counters = table.counters()
    assert (counters["evicted"], counters["expired"], counters["size"]) == (64, 0, 64)


def test_expired_slots_are_free(device_type):
    table = make(device_type, 64, expire_after=1)
    for part in distinct_ids(64 * 5, device_type).split(64):
        table.find_or_insert(part)
        assert table.contains(part).all()
        idle(table, 1)
    counters = table.counters()
    assert (counters["evicted"], counters["inserted"]) == (0, 320)


def test_expire_looks_at_all_buckets_and_is_no_call(device_type):
    table = make(device_type, 64 * 40, expire_after=30)
    ids = distinct_ids(1000, device_type)
    table.find_or_insert(ids[:600])
    table.find_or_insert(ids[600:])
    table.expire()
    idle(table, 29)
    table.expire()
    assert table.size == 1000
    idle(table, 1)
    left = table.size
    table.expire()
    table.expire()
    assert table.contains(ids).tolist() == [False] * 600 + [True] * 400
    assert left > 400
    assert table.counters()["expired"] == 600


def test_of_an_empty_table(device_type):
    table = make(device_type, 64, expire_after=1)
    table.expire()
    idle(table, 5)
    table.expire()
    assert table.counters()["expired"] == 0


def test_tables_without_it_keep_all(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(64, device_type)
    table.find_or_insert(ids)
    idle(table, 300)
    assert table.size == 64
    with pytest.raises(ValueError, match=r"expire_after is None, so no entry expires"):
        table.expire()


@pytest.mark.parametrize("expire_after", [0, -1, 2**32, 1.5, "3", True])
def test_impossible_ages(expire_after):
    match = r"table 'table': expire_after is .*, but must be a number of calls from 1 to 2\^32 - 1"
    with pytest.raises(ValueError, match=match):
        make("cpu", expire_after=expire_after)
