"""Random calls on both devices, each compared with the model; tables from one bucket to many."""

import random

import pytest

from tests.support.batches import INT64_MAX, INT64_MIN
from tests.support.checked_table import CheckedTable
from tests.support.table_model import POLICIES, TAKES_SCORES, Row
from torchrec_hkv.hash_table import MinFrequency, Probability

CALLS = [
    "find",
    "find_or_insert",
    "find_or_insert_slots",
    "insert_or_assign",
    "insert_and_evict",
    "insert_and_evict",
    "accum_or_assign",
    "assign",
    "assign_rows",
    "assign_scores",
    "erase",
    "select",
    "next_epoch",
    "expire",
]


class Driver:
    """Makes up calls."""

    def __init__(self, checked: CheckedTable, policy: str, capacity: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.checked = checked
        self.policy = policy
        self.batch = max(3, capacity // 3)
        others = [self.random.randint(INT64_MIN, INT64_MAX) for _ in range(capacity)]
        self.pool = [*range(-capacity // 2, capacity), INT64_MIN, INT64_MAX, *others]

    def ids(self) -> list[int]:
        ids = self.random.choices(self.pool, k=self.random.randint(0, self.batch))
        return ids + ids[: self.random.choice([0, 0, 1, 50])]

    def scores(self, ids: list[int]) -> list[int] | None:
        if self.policy not in TAKES_SCORES:
            return None
        if self.policy != "customized":
            return None if self.random.random() < 0.5 else [self.random.randint(0, 4) for _ in ids]
        return [self.random.choice([self.random.randint(0, 99), 2**63 + 5]) for _ in ids]

    def rows(self, ids: list[int]) -> list[Row]:
        return [(float(self.random.randint(-99, 99)), float(at % 251)) for at in range(len(ids))]

    def call(self) -> None:
        name = self.random.choice(CALLS)
        checked, ids = self.checked, self.ids()
        if name in ("find", "erase"):
            getattr(checked, name)(ids[:20] if name == "erase" else ids)
        elif name in ("find_or_insert", "find_or_insert_slots", "assign_scores"):
            getattr(checked, name)(ids, self.scores(ids))
        elif name in ("insert_or_assign", "insert_and_evict", "assign"):
            getattr(checked, name)(ids, self.rows(ids), self.scores(ids))
        elif name == "assign_rows":
            checked.assign_rows(ids, self.rows(ids))
        elif name == "accum_or_assign":
            ids = list(dict.fromkeys(ids))
            beliefs = [
                (id_ in checked.model.entries) != (self.random.random() < 0.1) for id_ in ids
            ]
            checked.accum_or_assign(ids, self.rows(ids), beliefs, self.scores(ids))
        elif name == "select":
            scores = sorted(entry.score for entry in checked.model.entries.values()) or [0]
            low = scores[len(scores) // 20]
            checked.export_if(11, score_at_least=low, older_than=1)
            checked.erase_if(score_below=low, older_than=2)
        elif name == "next_epoch" and self.policy.startswith("epoch"):
            checked.next_epoch()
        elif name == "expire" and checked.model.expire_after is not None:
            checked.expire()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [7, 64, 100, 200, 1000])
def test_random_calls(device_type, policy, capacity):
    checked = CheckedTable(policy, capacity, device=device_type)
    driver = Driver(checked, policy, capacity, seed=capacity)
    for _ in range(80):
        driver.call()


# So many cells that no set is ever full: then the order within a call doesn't matter.
ADMISSIONS = {
    "cells": MinFrequency(3, entries=1 << 16),
    "cells, halved": MinFrequency(4, entries=1 << 16, halve_every=5),
    "sketch": MinFrequency(3, sketch_bytes=1 << 12, halve_every=7),
    "probability": Probability(0.3),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [64, 200, 1000])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_random_calls_with_admission_and_expiry(device_type, policy, capacity, admission):
    expire_after = {64: 3, 200: 20, 1000: None}[capacity]
    checked = CheckedTable(
        policy,
        capacity,
        device=device_type,
        admission=ADMISSIONS[admission],
        expire_after=expire_after,
    )
    driver = Driver(checked, policy, capacity, seed=capacity)
    for _ in range(60):
        driver.call()
    assert checked.model.inserted > 0
    assert checked.model.unadmitted > 0
    assert checked.model.expired > 0 or capacity > 64
