"""Large counts are exact: a CPU stores their low and high bits in two arrays."""

import pytest
import torch

from tests.support.tables import make, scores_of
from torchrec_hkv.hash_table import AgedLFU

POLICIES = ["lfu", AgedLFU(2.0)]
#: Counts that a lookup adds: small ones carry after many lookups, large ones each time.
GIVEN = [1, 2, 126, 127, 128, 129, 2**14, 2**15 - 1, 2**15, 2**40, 2**61]
MAX = 2**63 - 1


@pytest.mark.parametrize("policy", POLICIES)
def test_sums_of_lookups(device_type, policy):
    table = make(device_type, 400, dim=1, eviction=policy)
    expected = dict.fromkeys(range(300), 0)
    for _ in range(12):
        ids, drawn = torch.randint(300, (500,)), torch.randint(len(GIVEN), (500,))
        given = torch.tensor(GIVEN)[drawn]
        table.find_or_insert(ids.to(device_type), given.to(device_type))
        for id_, more in zip(ids.tolist(), given.tolist(), strict=True):
            expected[id_] = min(expected[id_] + more, MAX)
    assert scores_of(table) == {id_: count for id_, count in expected.items() if count}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("given", [None, 3, 127, 128, 2**15])
def test_many_positions_of_few_ids(device_type, policy, given):
    # Threads share one table, and add to the same counts.
    table = make(device_type, 64, dim=1, eviction=policy)
    expected = dict.fromkeys(range(5), 0)
    for _ in range(4):
        ids = torch.randint(5, (40_000,))
        scores = None if given is None else torch.full_like(ids, given).to(device_type)
        table.find_or_insert(ids.to(device_type), scores)
        for id_, times in enumerate(ids.bincount(minlength=5).tolist()):
            expected[id_] += times * (given or 1)
    assert scores_of(table) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_export_and_load(device_type, policy, tmp_path):
    ids = torch.arange(8, device=device_type)
    counts = torch.tensor([1, 127, 128, 2**16, 2**31, 2**32 + 7, 2**47, MAX])
    table = make(device_type, 64, dim=1, eviction=policy)
    table.find_or_insert(ids, counts.to(device_type))
    expected = dict(zip(range(8), counts.tolist(), strict=True))
    assert scores_of(table) == expected
    table.save(tmp_path)
    loaded = make(device_type, 64, dim=1, eviction=policy)
    loaded.load(tmp_path)
    assert scores_of(loaded) == expected
    loaded.find_or_insert(ids)
    assert scores_of(loaded) == {id_: min(count + 1, MAX) for id_, count in expected.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_grows_keeps_them(device_type, policy):
    table = make(device_type, 4000, dim=1, eviction=policy, initial_capacity=64)
    ids = torch.arange(3000, device=device_type)
    counts = torch.tensor(GIVEN, device=device_type)[ids % len(GIVEN)]
    for part in range(0, 3000, 50):
        table.find_or_insert(ids[part : part + 50], counts[part : part + 50])
    assert scores_of(table) == dict(zip(ids.tolist(), counts.tolist(), strict=True))
