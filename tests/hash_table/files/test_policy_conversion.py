"""Tables under LRU, LFU and AgedLFU load each other's files, with all that each policy can use."""

import copy
import itertools

import pytest
import torch

from tests.support.tables import distinct_ids, make, scores_of
from torchrec_hkv.hash_table import AgedLFU, HashTable

POLICIES = ("lru", "lfu", AgedLFU(2.0))


def trained(device: str, eviction, capacity: int = 300) -> HashTable:
    """A full table, whose ids differ in counts and in last lookups."""
    table = make(device, capacity, eviction=eviction)
    ids = distinct_ids(2 * capacity, device)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        at = (torch.rand(60, generator=generator) ** 2 * len(ids)).long()
        table.find_or_insert(ids[at.to(device)])
    return table


def last_steps_of(table: HashTable) -> dict[int, int]:
    state = table.group.export_table(0)
    there = state.occupied
    return dict(zip(state.ids[there].tolist(), state.last_steps[there].tolist(), strict=True))


@pytest.mark.parametrize(("saved", "own"), itertools.permutations(POLICIES, 2))
@pytest.mark.parametrize("capacity", [300, 700])
def test_counts_and_last_calls_come_along(device_type, tmp_path, saved, own, capacity):
    source = trained(device_type, saved)
    source.save(tmp_path / "table")
    loaded = make(device_type, capacity, eviction=own)
    loaded.find_or_insert(distinct_ids(40, device_type))
    loaded.load(tmp_path / "table")
    assert last_steps_of(loaded) == last_steps_of(source)
    if own == "lru":
        expected = last_steps_of(source)
    elif saved == "lru":
        expected = dict.fromkeys(scores_of(source), 1)
    else:
        expected = scores_of(source)
    assert scores_of(loaded) == expected
    assert loaded.eviction == own


def test_another_c(tmp_path, device_type):
    source = trained(device_type, AgedLFU(2.0))
    source.save(tmp_path / "table")
    loaded = make(device_type, 300, eviction=AgedLFU(5.0))
    loaded.load(tmp_path / "table")
    assert scores_of(loaded) == scores_of(source)
    assert loaded.eviction == AgedLFU(5.0)


@pytest.mark.parametrize("own", ["epoch_lru", "epoch_lfu", "customized"])
@pytest.mark.parametrize("saved", ["lru", "lfu", AgedLFU()])
def test_other_policies_are_refused(tmp_path, saved, own):
    trained("cpu", saved).save(tmp_path / "table")
    with pytest.raises(ValueError, match=f"its eviction is .*but that of table .* is '{own}'"):
        make("cpu", 300, eviction=own).load(tmp_path / "table")


def test_from_file(tmp_path):
    source = trained("cpu", "lru")
    source.save(tmp_path / "table")
    assert HashTable.from_file(tmp_path / "table").eviction == "lru"
    table = HashTable.from_file(tmp_path / "table", eviction=AgedLFU(4.0))
    assert table.eviction == AgedLFU(4.0)
    table.save(tmp_path / "aged")
    assert HashTable.from_file(tmp_path / "aged").eviction == AgedLFU()
    assert HashTable.from_file(tmp_path / "aged", eviction="lfu").eviction == "lfu"


def test_training_goes_on_as_without_a_save(device_type, tmp_path):
    """The file keeps the mean number of lookups of a call, which determines the half-life."""
    source = trained(device_type, AgedLFU(2.0))
    source.save(tmp_path / "table")
    loaded = make(device_type, 300, eviction=AgedLFU(2.0))
    loaded.load(tmp_path / "table")
    tables = [source, loaded, copy.deepcopy(source)]
    generator = torch.Generator().manual_seed(4)
    for _ in range(40):
        ids = (torch.rand(60, generator=generator) ** 2 * 1000).long().to(device_type)
        for table in tables:
            table.find_or_insert(ids)
        if device_type == "cpu":
            assert scores_of(source) == scores_of(loaded) == scores_of(tables[2])
    measured = [table.group.measured_aging(0) for table in tables]
    assert measured[0] == measured[1] == measured[2]
