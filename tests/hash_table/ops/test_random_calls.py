"""Random calls on both devices, each compared with the model; tables from one bucket to many."""

import pytest

from tests.support.checked_table import CheckedTable
from tests.support.random_calls import Driver
from tests.support.table_model import POLICIES
from torchrec_hkv.hash_table import MinFrequency, Probability


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
