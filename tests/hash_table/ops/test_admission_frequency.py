"""A new id gets a slot after enough lookups; counts are exact."""

import pytest
import torch

from tests.support.batches import INT64_MAX, INT64_MIN
from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, distinct_ids, expected_initial_rows, make
from torchrec_hkv.hash_table import MinFrequency


def make_counting(device: str, count: int, capacity: int = 64, **options):
    return make(device, capacity, admission=MinFrequency(count, entries=1024), **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_admitted_when_asked_for_often_enough(device_type, policy, count):
    table = make_counting(device_type, count, eviction=policy)
    ids = distinct_ids(20, device_type)
    expected = expected_initial_rows(table, ids)
    scores = constant_scores(table, 20)
    for _ in range(count - 1):
        slots, found = table.find_or_insert_slots(ids, scores)
        assert (slots == -1).all()
        assert not found.any()
    assert table.counters()["unadmitted"] == 20 * (count - 1)
    assert table.counters()["inserted"] == table.size == 0
    rows, found = table.find_or_insert(ids, scores)
    assert torch.equal(rows, expected)
    assert not found.any()
    assert table.contains(ids).all()
    assert table.find_or_insert(ids, scores)[1].all()
    counters = table.counters()
    assert counters["unadmitted"] == 20 * (count - 1)
    assert counters["inserted"] == counters["hits"] == 20
    assert counters["refused"] == counters["evicted"] == 0


def test_an_unadmitted_id_has_its_initial_row(device_type):
    table = make_counting(device_type, 2)
    ids = distinct_ids(10, device_type)
    rows, found = table.find_or_insert(ids)
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert not found.any()


def test_all_occurrences_of_a_call_count_and_share_one_fate(device_type):
    table = make_counting(device_type, 3)
    a, b, c = distinct_ids(3, device_type).tolist()
    ids = torch.tensor([a, b, c, a, b, a], device=device_type)
    slots, _ = table.find_or_insert_slots(ids)
    assert (slots >= 0).tolist() == [True, False, False, True, False, True]
    assert len(set(slots[[0, 3, 5]].tolist())) == 1
    assert table.counters()["unadmitted"] == 3
    slots, _ = table.find_or_insert_slots(torch.tensor([b, c, b], device=device_type))
    assert (slots >= 0).tolist() == [True, False, True]
    slots, _ = table.find_or_insert_slots(torch.tensor([c, c], device=device_type))
    assert (slots >= 0).all()


def test_a_hot_new_id_among_many(device_type):
    """There are more positions than threads of a block, and one id takes half of them."""
    table = make(device_type, 20_000, admission=MinFrequency(1000, entries=1 << 17))
    ids = distinct_ids(10_000, device_type)
    batch = torch.cat([ids, ids[:1].expand(10_000)])
    batch = batch[torch.randperm(20_000, device=device_type)]
    slots, _ = table.find_or_insert_slots(batch)
    assert torch.equal(slots >= 0, batch == ids[0])
    assert table.counters()["unadmitted"] == 9_999
    slots, _ = table.find_or_insert_slots(ids[1:].repeat(999))
    assert (slots >= 0).all()


def test_every_int64_is_counted(device_type):
    # Also the id whose hash is zero, and id zero.
    ids = [INT64_MIN, INT64_MIN + 1, -1, 0, 1, INT64_MAX, 0xBB67AE8584CAA73B - 2**64]
    table = make_counting(device_type, 2)
    batch = torch.tensor(ids, device=device_type)
    assert (table.find_or_insert_slots(batch)[0] == -1).all()
    assert (table.find_or_insert_slots(batch)[0] >= 0).all()


def test_only_missing_ids_are_counted_and_only_by_calls_that_insert(device_type):
    table = make_counting(device_type, 3)
    ids = distinct_ids(2, device_type)
    for _ in range(5):
        table.find(ids)
        table.find_missing(ids)
        table.assign_scores(ids)
    table.find_or_insert(ids)
    table.find_or_insert(ids)
    assert table.size == 0
    table.find_or_insert(ids)
    assert table.size == 2
    for _ in range(5):
        table.find_or_insert(ids)
    table.erase(ids[:1])  # the count restarts, despite eight lookups
    table.find_or_insert(ids)
    table.find_or_insert(ids)
    assert table.contains(ids).tolist() == [False, True]
    table.find_or_insert(ids)
    assert table.contains(ids).all()


@pytest.mark.parametrize("call", ["insert_or_assign", "accum_or_assign"])
def test_insertions_count_and_write_nothing_for_unadmitted_ids(device_type, call):
    table = make_counting(device_type, 2)
    ids = distinct_ids(6, device_type)
    rows = torch.full((6, 4), 7.0, device=device_type)
    if call == "insert_or_assign":
        assert not table.insert_or_assign(ids, rows).any()
        assert table.insert_or_assign(ids[:3], rows[:3]).all()
    else:
        nowhere = torch.zeros(6, dtype=torch.bool, device=device_type)
        table.accum_or_assign(ids, rows, nowhere)
        assert table.size == 0
        table.accum_or_assign(ids[:3], rows[:3], nowhere[:3])
    found_rows, found = table.find(ids)
    assert found.tolist() == [True] * 3 + [False] * 3
    assert (found_rows[:3] == 7).all()
    assert torch.equal(found_rows[3:], expected_initial_rows(table, ids[3:]))


def test_clear_forgets_counts(device_type):
    table = make_counting(device_type, 2)
    ids = distinct_ids(5, device_type)
    table.find_or_insert(ids)
    table.clear()
    table.find_or_insert(ids)
    assert table.size == 0
    table.find_or_insert(ids)
    assert table.size == 5


def test_refused_for_a_lower_score_and_unadmitted_are_counted_apart(device_type):
    table = make_counting(device_type, 2, eviction="customized")
    ids = distinct_ids(65, device_type)
    high = torch.full((64,), 9, device=device_type)
    table.find_or_insert(ids[:64], high)
    table.find_or_insert(ids[:64], high)
    assert table.size == 64
    low = torch.tensor([1], device=device_type)
    for _ in range(2):
        assert table.find_or_insert_slots(ids[64:], low)[0].tolist() == [-1]
    assert table.counters()["unadmitted"] == 64 + 1
    assert table.counters()["refused"] == 1
