"""Random calls on groups of 1 to 64 tables, each call one launch, agree with a model for each
table."""

import dataclasses

import pytest
import torch

from tests.support.checked_group import CheckedGroup, GroupDriver, random_specs
from tests.support.tiers import hbm_bytes_for
from torchrec_hkv.hash_table import MinFrequency, Probability


@pytest.mark.parametrize(("number", "calls"), [(3, 60), (17, 25), (64, 8)])
def test_any_policies(device_type, number, calls):
    driver = GroupDriver(CheckedGroup(random_specs(number, number), device_type), seed=number)
    for _ in range(calls):
        driver.call()


def test_admission_and_expiry(device_type):
    options = [
        {"admission": MinFrequency(3, entries=1 << 14)},
        {"admission": Probability(0.3), "expire_after": 5},
        {"expire_after": 2},
        {"admission": MinFrequency(3, sketch_bytes=1 << 12, halve_every=7)},
        {},
    ]
    specs = [
        dataclasses.replace(spec, **its)
        for spec, its in zip(random_specs(5, seed=3), options, strict=True)
    ]
    checked = CheckedGroup(specs, device_type)
    driver = GroupDriver(checked, seed=3)
    for _ in range(60):
        driver.call()
    assert sum(table.model.unadmitted for table in checked.checked) > 0
    assert sum(table.model.expired for table in checked.checked) > 0
    assert sum(table.model.evicted for table in checked.checked) > 0


@pytest.mark.parametrize("dtypes", [("float16",) * 3, ("float32", "bfloat16", "float16")])
def test_types_of_rows(device_type, dtypes):
    specs = [
        dataclasses.replace(spec, dtype=getattr(torch, dtype))
        for spec, dtype in zip(random_specs(3, seed=8), dtypes, strict=True)
    ]
    checked = CheckedGroup(specs, device_type)
    different = len(set(dtypes)) > 1
    assert checked.group.row_dtype == (torch.float32 if different else torch.float16)
    driver = GroupDriver(checked, seed=8)
    for _ in range(40):
        driver.call()


def test_tables_that_grow(device_type):
    specs = [
        dataclasses.replace(spec, capacity=1024 * (1 + at), initial_capacity=64)
        for at, spec in enumerate(random_specs(4, seed=4))
    ]
    checked = CheckedGroup(specs, device_type)
    driver = GroupDriver(checked, seed=4)
    for _ in range(40):
        driver.call()
    assert checked.group.growths > 0


def test_tables_in_two_tiers(device_type):
    """One table in HBM, two partly in HBM, one in host memory."""
    shares = [None, 0.5, 0.1, 0.0]
    specs = [
        dataclasses.replace(
            spec,
            capacity=600,
            hbm_bytes=share
            if share is None
            else hbm_bytes_for(share, 600, spec.dim, eviction=spec.eviction),
        )
        for spec, share in zip(random_specs(4, seed=6), shares, strict=True)
    ]
    checked = CheckedGroup(specs, device_type)
    if device_type == "cuda":
        assert [checked.group.host_bytes(table) > 0 for table in range(4)] == [
            False,
            True,
            True,
            True,
        ]
    driver = GroupDriver(checked, seed=6)
    for _ in range(40):
        driver.call()
