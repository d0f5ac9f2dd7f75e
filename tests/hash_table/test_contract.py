"""Every kind of table keeps its contract: random calls, each compared with the model.

Tables from one bucket to many, alone and in groups, on both devices. Other tests cover what is
particular to a kind (``growth``, ``tiers``, ``deterministic``, ``groups``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.checked_group import CheckedGroup, GroupDriver, random_specs
from tests.support.checked_table import CheckedTable
from tests.support.random_calls import Driver
from tests.support.table_model import POLICIES
from torchrec_hkv.hash_table import (
    Admission,
    EvictionPolicy,
    MinFrequency,
    Probability,
    table_memory,
)

KINDS = ("plain", "growing", "tiered", "deterministic")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of table."""
    return request.param


def options_of(
    kind: str,
    capacity: int,
    dim: int,
    policy: EvictionPolicy,
    admission: Admission | None = None,
) -> dict[str, Any]:
    """Options that make a table of a kind."""
    if kind == "growing":
        return {"initial_capacity": max(1, capacity // 9)}
    if kind == "tiered":
        memory = table_memory(capacity, dim, 0, policy, admission=admission)
        share = memory.num_slots * memory.row_bytes // 3
        return {"hbm_bytes": max(memory.least_hbm_bytes, memory.index_bytes + share)}
    return {"deterministic": True} if kind == "deterministic" else {}


def checked_table(
    kind: str, policy: EvictionPolicy, capacity: int, device: str, **more: Any
) -> CheckedTable:
    """A table of a kind beside its model."""
    options = options_of(kind, capacity, 2, policy, more.get("admission"))
    return CheckedTable(policy, capacity, device=device, **options, **more)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [7, 64, 100, 200, 1000])
def test_random_calls(device_type, kind, policy, capacity):
    checked = checked_table(kind, policy, capacity, device_type)
    driver = Driver(checked, policy, capacity, seed=capacity)
    for _ in range(80 if kind == "plain" else 40):
        driver.call()
    if kind == "growing" and capacity > 64:
        assert checked.table.num_slots > checked.first_slots
    if kind == "tiered" and device_type == "cuda" and capacity > 64:
        assert checked.table.group.host_bytes(0) > 0


# So many cells that none is replaced: the order within a call does not matter.
ADMISSIONS = {
    "cells": MinFrequency(3, entries=1 << 16),
    "cells, halved": MinFrequency(4, entries=1 << 16, halve_every=5),
    "sketch": MinFrequency(3, sketch_bytes=1 << 12, halve_every=7),
    "probability": Probability(0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [64, 200, 1000])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_random_calls_with_admission_and_expiry(device_type, policy, capacity, admission):
    expire_after = {64: 3, 200: 20, 1000: None}[capacity]
    checked = checked_table(
        "plain",
        policy,
        capacity,
        device_type,
        admission=ADMISSIONS[admission],
        expire_after=expire_after,
    )
    driver = Driver(checked, policy, capacity, seed=capacity)
    for _ in range(60):
        driver.call()
    assert checked.model.inserted > 0
    assert checked.model.unadmitted > 0
    assert checked.model.expired > 0 or capacity > 64


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_kinds_with_admission(device_type, kind, policy, admission):
    checked = checked_table(kind, policy, 200, device_type, admission=ADMISSIONS[admission])
    driver = Driver(checked, policy, 200, seed=3)
    for _ in range(30):
        driver.call()
    assert checked.model.inserted > 0
    assert checked.model.unadmitted > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", [1, 5])
def test_groups(device_type, kind, policy, number):
    specs = [
        dataclasses.replace(spec, **options_of(kind, spec.capacity, spec.dim, spec.eviction))
        for spec in random_specs(number, number, [policy])
    ]
    deterministic = any(spec.deterministic for spec in specs)
    assert deterministic == (kind == "deterministic")
    driver = GroupDriver(CheckedGroup(specs, device_type), number)
    for _ in range(40):
        driver.call()
