"""Only the strict tables of a group raise."""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec


def make(device: str, strict: tuple[bool, bool]) -> TableGroup:
    specs = [
        TableSpec(name, capacity, 4, strict=its)
        for name, capacity, its in zip(("user", "page"), (64, 128), strict, strict=True)
    ]
    return TableGroup(specs, [0, 1], SGD(), device=device)


def batch(users: int, pages: int, device: str) -> Bags:
    ids = random_ids(users + pages)
    return Bags(ids, torch.tensor([0, users, users + pages]), 1).to(device)


def test_only_the_strict_table_matters(device_type):
    group = make(device_type, (False, True))
    insert(group, batch(100, 128, device_type))
    assert group.counters()[0]["refused"] == 36
    with pytest.raises(RuntimeError, match=r"^Table 'page' is strict and had no place for 22 of "):
        insert(group, batch(100, 150, device_type))
    insert(group, batch(100, 128, device_type))


def test_both(device_type):
    group = make(device_type, (True, True))
    match = r"Table 'user' .* no place for 6 .* Table 'page' .* no place for 12 "
    with pytest.raises(RuntimeError, match=match):
        insert(group, batch(70, 140, device_type))
    assert [counters["size"] for counters in group.counters()] == [64, 128]


def test_rows_of_batches_in_flight_count(device_type):
    group = make(device_type, (True, False))
    out = lookup(group, batch(40, 1, device_type))
    with pytest.raises(RuntimeError, match=r"had no place for 16 .* Its load is 1\.000"):
        lookup(group, batch(40, 1, device_type))
    out.sum().backward()
    lookup(group, batch(40, 1, device_type))  # the failed call left no pin
