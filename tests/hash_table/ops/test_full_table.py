"""A full table evicts its lowest score, or refuses the new id."""

import pytest
import torch

from tests.support.tables import (
    contents,
    distinct_ids,
    expected_initial_rows,
    make,
    random_rows,
    scores_tensor,
)

# Eviction is exact with one bucket, and with two, since both are candidates of every id.
CAPACITIES = [1, 5, 63, 64, 100, 128]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_customized_keeps_the_highest(device_type, capacity):
    table = make(device_type, capacity, eviction="customized")
    ids = distinct_ids(5 * capacity, device_type)
    scores = torch.randperm(5 * capacity)
    # One id at a time: a call never evicts what it has inserted, whatever its score.
    for id_, score in zip(ids.split(1), scores.to(device_type).split(1), strict=True):
        table.find_or_insert(id_, score)
    kept = {id_: score for id_, (_, score, _) in contents(table).items()}
    pairs = sorted(zip(scores.tolist(), ids.tolist(), strict=True))[-capacity:]
    assert kept == {id_: score for score, id_ in pairs}


def test_customized_scores_are_signed(device_type):
    table = make(device_type, 64, eviction="customized")
    ids = distinct_ids(128, device_type)
    low = scores_tensor([at - 64 for at in range(64)], device_type)
    high = scores_tensor(list(range(64)), device_type)
    table.find_or_insert(ids[:64], low)
    table.find_or_insert(ids[64:96], high[:32])
    assert contents(table).keys() == set(ids[32:96].tolist())
    assert not table.insert_or_assign(ids[:32], random_rows(table, 32), low[:32]).any()
    assert contents(table).keys() == set(ids[32:96].tolist())


def test_the_highest_score_is_no_special_value(device_type):
    table = make(device_type, 64, eviction="customized")
    ids = distinct_ids(128, device_type)
    maximum = scores_tensor([2**63 - 1] * 64, device_type)
    table.find_or_insert(ids[:64], maximum)
    slots, _ = table.find_or_insert_slots(ids[64:], maximum)  # equal scores: the new id is inserted
    assert (slots >= 0).all()
    assert contents(table).keys() == set(ids[64:].tolist())


@pytest.mark.parametrize("policy", ["lfu", "epoch_lfu", "customized"])
def test_refused_when_its_own_score_is_lower(device_type, policy):
    table = make(device_type, 64, dim=3, eviction=policy)
    ids = distinct_ids(100, device_type)
    rows = random_rows(table, 64)
    scores = torch.full((64,), 5, device=device_type)
    assert table.insert_or_assign(ids[:64], rows, scores).all()
    newcomers, few = ids[64:], scores[:36] - 1
    slots, found = table.find_or_insert_slots(newcomers, few)
    assert (slots == -1).all()
    assert not found.any()
    found_rows, _ = table.find_or_insert(newcomers, few)
    assert torch.equal(found_rows, expected_initial_rows(table, newcomers))
    assert not table.insert_or_assign(newcomers, random_rows(table, 36), few).any()
    nowhere = torch.zeros(36, dtype=torch.bool, device=device_type)
    table.accum_or_assign(newcomers, random_rows(table, 36), nowhere, few)
    assert torch.equal(table.find(ids[:64])[0], rows)
    assert table.size == 64
    assert table.counters()["refused"] == 4 * 36
    assert table.counters()["evicted"] == 0
    assert table.insert_or_assign(newcomers, random_rows(table, 36), few + 1).all()  # equal: in
    assert table.counters()["evicted"] == 36


@pytest.mark.parametrize("policy", ["lru", "epoch_lru"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_lru_keeps_the_newest(device_type, policy, capacity):
    table = make(device_type, capacity, eviction=policy)
    ids = distinct_ids(4 * capacity, device_type)
    for id_ in ids[: 2 * capacity].split(1):
        table.find_or_insert(id_)
    assert contents(table).keys() == set(ids[capacity : 2 * capacity].tolist())
    table.epoch += 1
    table.find_or_insert(ids[2 * capacity : 3 * capacity])
    assert contents(table).keys() == set(ids[2 * capacity : 3 * capacity].tolist())


def test_lru_a_touch_protects(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(84, device_type)
    for id_ in ids[:64].split(1):
        table.find_or_insert(id_)
    table.find_or_insert(ids[:10])
    table.find(ids[10:20])  # does not touch
    table.find_or_insert(ids[64:])
    assert contents(table).keys() == set(ids.tolist()) - set(ids[10:30].tolist())


def test_lfu_keeps_the_frequent(device_type):
    table = make(device_type, 64, eviction="lfu")
    ids = distinct_ids(84, device_type)
    for turn in range(3):
        table.find_or_insert(ids[: 44 if turn else 64])
    table.find_or_insert(ids[64:])
    assert contents(table).keys() == set(ids[:44].tolist()) | set(ids[64:].tolist())


def test_epoch_lfu_an_earlier_epoch_leaves_first(device_type):
    table = make(device_type, 64, eviction="epoch_lfu")
    ids = distinct_ids(84, device_type)
    table.find_or_insert(ids[:20], torch.full((20,), 1000, device=device_type))
    table.epoch = 1
    table.find_or_insert(ids[20:64])
    table.find_or_insert(ids[64:])
    assert contents(table).keys() == set(ids[20:].tolist())


@pytest.mark.parametrize("policy", ["lfu", "customized"])
def test_among_equals_the_one_touched_longest_ago_leaves(device_type, policy):
    table = make(device_type, 64, eviction=policy)
    ids = distinct_ids(74, device_type)

    def scores(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=torch.int64, device=device_type)

    for id_ in ids[:64].flip(0).split(1):
        table.find_or_insert(id_, scores(1))
    touch = ids[54:64]  # the oldest ids are touched, and their scores stay
    table.assign_scores(touch, 0 * scores(10) if policy == "lfu" else scores(10))
    table.find_or_insert(ids[64:], scores(10))
    assert contents(table).keys() == set(ids.tolist()) - set(ids[44:54].tolist())


@pytest.mark.parametrize("policy", ["lru", "lfu", "epoch_lru", "epoch_lfu", "customized"])
def test_what_the_call_touches_stays(device_type, policy):
    """A call does not evict what it touches, even with the lowest score."""
    table = make(device_type, 64, eviction=policy)
    ids = distinct_ids(100, device_type)
    scores = torch.full((64,), 5, device=device_type)
    takes = policy in ("lfu", "epoch_lfu", "customized")
    table.find_or_insert(ids[:64], scores if takes else None)
    call = torch.cat([ids[64:], ids[:40]])  # room for 24 of 36 new ids
    low = torch.full((76,), 0, device=device_type)
    low[:36] = 9
    slots, found = table.find_or_insert_slots(call, low if takes else None)
    assert found.tolist() == [False] * 36 + [True] * 40
    assert (slots[36:] >= 0).all()
    assert (slots[:36] >= 0).sum() == 24
    assert table.contains(ids[:40]).all()
    assert not table.contains(ids[40:64]).any()
    if device_type == "cpu":
        assert (slots[:24] >= 0).all()


def test_nothing_leaves_while_there_is_room(device_type):
    table = make(device_type, 64_000, dim=1, eviction="customized")
    ids = distinct_ids(int(64_000 * 0.95), device_type)
    for part in ids.split(1000):
        table.find_or_insert(part, torch.zeros_like(part))
    assert table.size == len(ids)
    assert table.counters()["evicted"] == table.counters()["refused"] == 0
