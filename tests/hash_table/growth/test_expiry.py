"""Entries of growing tables expire, and free slots do not count as expired entries.

An entry leaves once it is too old, at the latest when every bucket has had its turn since, or since
the table last grew, which changes the buckets.
"""

import random

import pytest
import torch

from torchrec_hkv.hash_table import HashTable


def ids_of(table: HashTable) -> set[int]:
    return {int(id_) for part in table.export() for id_ in part.ids}


@pytest.mark.parametrize("expire_after", [1, 5, 70])
@pytest.mark.parametrize("reserves", [False, True])
def test_too_old_and_no_later_than_promised(device_type, expire_after, reserves):
    table = HashTable(1, 4000, initial_capacity=64, expire_after=expire_after, device=device_type)
    period = min(64, expire_after)
    pool = [random.randrange(-(2**63), 2**63) for _ in range(2500)]
    touched: dict[int, int] = {}
    slots, grown = table.num_slots, 0
    for call in range(1, 160):
        if reserves and call % 40 == 0:
            table.reserve(min(table.capacity, 2 * table.num_slots))
        ids = random.sample(pool[: 15 * call], min(15 * call, random.randrange(1, 60)))
        table.find_or_insert(torch.tensor(ids, device=device_type))
        touched |= dict.fromkeys(ids, call)
        if table.num_slots != slots:
            slots, grown = table.num_slots, call
        there = ids_of(table)
        for id_, last in touched.items():
            if call - last <= expire_after:
                assert id_ in there
            elif call >= max(last + expire_after + 1, grown) + period - 1:
                assert id_ not in there
        touched = {id_: last for id_, last in touched.items() if id_ in there}
        assert touched.keys() == there
    counters = table.counters()
    assert grown > 0
    assert counters["expired"] > 0
    assert counters["evicted"] == counters["refused"] == 0
    assert counters["inserted"] - counters["expired"] == counters["size"] == len(touched)


def test_all_at_once(device_type):
    """``expire`` after growth ignores slots that were never filled."""
    table = HashTable(1, 4000, initial_capacity=64, expire_after=3, device=device_type)
    old = torch.arange(40, device=device_type)
    new = torch.arange(40, 60, device=device_type)
    table.find_or_insert(old)
    for _ in range(3):
        table.find_or_insert(new)
    table.reserve(4000)
    table.find_or_insert(new[:1])
    table.expire()
    assert ids_of(table) == set(new.tolist())
    assert table.counters()["expired"] == len(old)
