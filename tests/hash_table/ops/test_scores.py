"""Scores are exact under every policy."""

import pytest
import torch

from tests.support.tables import distinct_ids, make, random_rows, scores_of, scores_tensor


def scores(table, ids: torch.Tensor) -> list[int]:
    by_id = scores_of(table)
    return [by_id[id_] for id_ in ids.tolist()]


def test_lru_is_the_number_of_the_call(device_type):
    table = make(device_type)
    ids = distinct_ids(5, device_type)
    table.find_or_insert(ids[:3])  # 1
    table.insert_or_assign(ids[1:4], random_rows(table, 3))  # 2
    assert scores(table, ids[:4]) == [1, 2, 2, 2]
    table.find(ids)
    table.assign_rows(ids[:1], random_rows(table, 1))
    table.insert_and_evict(ids[2:], random_rows(table, 3))  # 3
    table.assign_scores(ids[3:4])  # 4
    table.assign(ids[:1], random_rows(table, 1))  # 5
    assert scores(table, ids) == [5, 2, 3, 4, 3]


def test_lfu_adds_one_for_each_time(device_type):
    table = make(device_type, eviction="lfu")
    ids = distinct_ids(4, device_type)
    table.find_or_insert(ids[[0, 1, 1, 2, 2, 2]])
    assert scores(table, ids[:3]) == [1, 2, 3]
    table.insert_or_assign(ids[[3, 2, 2]], random_rows(table, 3))
    table.assign_scores(ids[[0, 0]])
    table.assign(ids[[1]], random_rows(table, 1))
    assert scores(table, ids) == [3, 3, 5, 1]


def test_lfu_adds_given_counts(device_type):
    table = make(device_type, eviction="lfu")
    ids = distinct_ids(3, device_type)
    table.find_or_insert(ids, torch.tensor([5, 0, 2**40], device=device_type))
    assert scores(table, ids) == [5, 0, 2**40]
    table.find_or_insert(ids, torch.tensor([0, 7, 2**40], device=device_type))
    assert scores(table, ids) == [5, 7, 2**41]
    table.assign_scores(ids[[0, 0, 1]], torch.tensor([10, 100, 1], device=device_type))
    assert scores(table, ids) == [115, 8, 2**41]


def test_lfu_does_not_wrap(device_type):
    table = make(device_type, eviction="lfu")
    ids = distinct_ids(3, device_type)
    table.find_or_insert(ids, scores_tensor([2**63 - 1, 2**62, 2**63 - 3], device_type))
    table.find_or_insert(ids, scores_tensor([1, 2**63 - 1, 2], device_type))
    assert scores(table, ids) == [2**63 - 1] * 3
    table.find_or_insert(ids)
    assert scores(table, ids) == [2**63 - 1] * 3


def test_epoch_lru(device_type):
    table = make(device_type, eviction="epoch_lru")
    ids = distinct_ids(4, device_type)
    table.find_or_insert(ids[:2])  # 1
    table.epoch = 7
    table.find_or_insert(ids[1:3])  # 2
    assert scores(table, ids[:3]) == [1, 7 << 32 | 2, 7 << 32 | 2]
    table.epoch = 2**32 - 1
    table.assign_scores(ids[[0, 2]])  # 3
    table.insert_or_assign(ids[3:], random_rows(table, 1))  # 4
    last = (2**32 - 1) << 32
    assert scores(table, ids) == [last | 3, 7 << 32 | 2, last | 3, last | 4]


def test_epoch_lfu(device_type):
    table = make(device_type, eviction="epoch_lfu")
    ids = distinct_ids(4, device_type)
    table.find_or_insert(ids[[0, 1, 1]])
    assert scores(table, ids[:2]) == [1, 2]
    table.epoch = 7
    table.find_or_insert(ids[1:3], torch.tensor([5, 6], device=device_type))
    assert scores(table, ids[:3]) == [1, 7 << 32 | 7, 7 << 32 | 6]
    table.epoch = 2**32 - 1
    table.assign_scores(ids[[0, 2, 2]])
    table.insert_or_assign(ids[3:], random_rows(table, 1))
    last = (2**32 - 1) << 32
    assert scores(table, ids) == [last | 2, 7 << 32 | 7, last | 8, last | 1]


def test_epoch_lfu_counts_stay_out_of_the_epoch(device_type):
    table = make(device_type, eviction="epoch_lfu")
    table.epoch = 3
    ids = distinct_ids(4, device_type)
    maximum = 2**32 - 1
    table.find_or_insert(ids, scores_tensor([maximum, maximum - 1, 2**32, 2**63 - 1], device_type))
    assert scores(table, ids) == [3 << 32 | low for low in (maximum, maximum - 1, maximum, maximum)]
    table.find_or_insert(ids)
    assert scores(table, ids) == [3 << 32 | maximum] * 4
    table.clear()
    table.find_or_insert(ids)
    table.find_or_insert(ids, scores_tensor([maximum, 2**32, 2**33 + 5, 2**63 - 1], device_type))
    assert scores(table, ids) == [3 << 32 | maximum] * 4


def test_customized_is_as_given(device_type):
    given = [0, 1, 2**32, 2**63 - 1, -(2**63), -1]
    table = make(device_type, eviction="customized")
    ids = distinct_ids(6, device_type)
    table.find_or_insert(ids, scores_tensor(given, device_type))
    assert scores(table, ids) == given
    table.find_or_insert(ids, scores_tensor(given[::-1], device_type))
    assert scores(table, ids) == given[::-1]  # set, also to a lower one
    table.insert_or_assign(ids, random_rows(table, 6), scores_tensor(given, device_type))
    assert scores(table, ids) == given


@pytest.mark.parametrize("there", [False, True])
def test_customized_duplicates_leave_one_of_their_scores(device_type, there):
    table = make(device_type, 400, eviction="customized")
    ids = distinct_ids(301, device_type)
    if there:
        table.find_or_insert(ids, torch.zeros(301, dtype=torch.int64, device=device_type))
    order = torch.cat([torch.arange(301), torch.randint(0, 301, (5000,))]).to(device_type)
    table.find_or_insert(ids[order], torch.arange(5301, device=device_type))
    found = torch.tensor(scores(table, ids), device=device_type)
    assert torch.equal(order[found].cpu(), torch.arange(301))


@pytest.mark.parametrize("there", [False, True])
def test_counts_of_many_duplicates(device_type, there):
    """Several threads lose no count."""
    for policy in ("lfu", "epoch_lfu"):
        table = make(device_type, 400, eviction=policy)
        ids = distinct_ids(301, device_type)
        if there:
            table.find_or_insert(ids, torch.zeros(301, dtype=torch.int64, device=device_type))
        order = torch.cat([torch.arange(301), torch.randint(0, 301, (50_000,))]).to(device_type)
        counts = torch.randint(0, 5, order.shape, device=device_type)
        table.find_or_insert(ids[order], counts)
        total = torch.zeros(301, dtype=torch.int64, device=device_type)
        total.index_add_(0, order, counts)
        assert scores(table, ids) == total.tolist()
