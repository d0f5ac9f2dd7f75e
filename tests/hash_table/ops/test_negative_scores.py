"""Negative scores: the lowest ones under customized; refused or 0 where scores are counts."""

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import contents, make, random_rows, scores_of
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec


def test_the_lowest_leaves(device_type):
    """An id with score -5 leaves."""
    table = make(device_type, 64, eviction="customized")
    ids = torch.arange(1000, device=device_type)
    table.insert_or_assign(ids[:64], random_rows(table, 64), ids[:64] - 64)
    table.insert_or_assign(ids[64:], random_rows(table, 936), torch.full_like(ids[64:], 10**6))
    assert not table.contains(ids[:64]).any()


def test_what_leaves_has_its_score(device_type):
    table = make(device_type, 64, eviction="customized")
    ids = torch.arange(128, device=device_type)
    table.insert_or_assign(ids[:64], random_rows(table, 64), ids[:64] - 1000)
    evicted = table.insert_and_evict(ids[64:96], random_rows(table, 32), ids[64:96] - 64)
    assert evicted.ids.sort().values.tolist() == [*range(32)]
    assert torch.equal(evicted.scores, evicted.ids - 1000)
    refused = table.insert_and_evict(ids[96:], random_rows(table, 32), ids[96:] - 10_000)
    assert torch.equal(refused.scores, refused.ids - 10_000)


@pytest.mark.parametrize("capacity", [64, 400])
def test_files_keep_them(device_type, tmp_path, capacity):
    """Loads into the same geometry, and into one that keeps the highest scores."""
    table = make(device_type, 300, eviction="customized")
    ids = torch.arange(-150, 150, device=device_type)
    table.insert_or_assign(ids, random_rows(table, 300), ids)
    held = scores_of(table)
    table.save(tmp_path / "table")
    loaded = HashTable.from_file(tmp_path / "table", device=device_type)
    assert scores_of(loaded) == held
    other = HashTable.from_file(
        tmp_path / "table", capacity=capacity, device=device_type, allow_loss=True
    )
    kept = scores_of(other)
    assert kept.items() <= held.items()
    if capacity == 64:  # one bucket, which keeps the highest
        assert sorted(kept.values()) == sorted(held.values())[-64:]
    state = table.group.export_table(0)
    assert torch.equal(state.scores[state.occupied], state.ids[state.occupied])
    other = make(device_type, 300, eviction="customized")
    other.group.load_table(0, state)
    assert scores_of(other) == held


@pytest.mark.parametrize("policy", ["lfu", "epoch_lfu"])
def test_negative_counts(device_type, policy):
    table = make(device_type, 64, eviction=policy)
    ids = torch.arange(4, device=device_type)
    table.find_or_insert(ids, torch.full_like(ids, 7))
    before, calls = contents(table), table.group.clock
    counts = torch.tensor([1, -5, 0, -(2**63)], device=device_type)
    rows = random_rows(table, 4)
    for call in (
        lambda: table.find_or_insert(ids, counts),
        lambda: table.insert_or_assign(ids + 10, rows, counts),
        lambda: table.insert_and_evict(ids + 10, rows, counts),
        lambda: table.assign_scores(ids, counts),
        lambda: table.assign(ids, rows, counts),
        lambda: table.accum_or_assign(ids, rows, ids >= 0, counts),
    ):
        if device_type == "cpu":
            match = r"must not be negative, but the lowest is -9223372036854775808\."
            with pytest.raises(ValueError, match=match):
                call()
        else:
            call()
    if device_type == "cpu":
        assert contents(table) == before
        assert table.group.clock == calls
        return
    scores = scores_of(table)
    assert [scores[id_] for id_ in range(4)] == [7 + 4, 7, 7, 7]
    assert [scores[id_] for id_ in range(10, 14)] == [2, 0, 0, 0]


def test_a_group_of_several_policies(device_type):
    """Each table orders scores by its own policy."""
    specs = [
        TableSpec("counts", 64, 2, eviction="lfu"),
        TableSpec("given", 64, 2, eviction="customized"),
        TableSpec("steps", 64, 2),
        TableSpec("more", 64, 2, eviction="customized"),
    ]
    group = TableGroup(specs, [0, 1, 2, 3], device=device_type)
    ids = torch.arange(8, device=device_type)
    offsets = torch.tensor([0, 2, 4, 6, 8], device=device_type)
    scores = torch.tensor([3, 4, -1, 1, -9, -9, -(2**63), 2**63 - 1], device=device_type)
    rows = torch.zeros(8, 2, device=device_type)
    group.insert_or_assign(ids, offsets, 1, rows, scores)
    entries = joined(group.export())
    by_id = dict(zip(entries.ids.tolist(), entries.scores.tolist(), strict=True))
    assert by_id == {0: 3, 1: 4, 2: -1, 3: 1, 4: 1, 5: 1, 6: -(2**63), 7: 2**63 - 1}

    def ids_with(**bounds: int) -> list[int]:
        parts = joined(group.export_if(**bounds))
        return [] if parts is None else sorted(parts.ids.tolist())

    assert ids_with(score_below=0) == [2, 6]
    assert ids_with(score_at_least=0) == [0, 1, 3, 4, 5, 7]
    assert ids_with(score_at_least=-1, score_below=4) == [0, 2, 3, 4, 5]
    assert ids_with(score_at_least=2**63) == []
    assert group.erase_if(score_below=2, tables=[1, 3]) == 3
    assert group.sizes() == [2, 0, 2, 1]
    evicted = group.insert_and_evict(
        ids, torch.tensor([0, 0, 8, 8, 8], device=device_type), 1, rows, scores
    )
    assert evicted.ids.numel() == 0


@pytest.mark.parametrize(
    ("policy", "bound", "allowed"),
    [
        ("customized", 2**63, r"from -2\^63 to 2\^63 - 1"),
        ("customized", -(2**63) - 1, r"from -2\^63 to 2\^63 - 1"),
        ("lfu", -1, r"from 0 to 2\^64 - 1"),
        ("lru", 2**64, r"from 0 to 2\^64 - 1"),
    ],
)
def test_impossible_bounds(device_type, policy, bound, allowed):
    table = make(device_type, 64, eviction=policy)
    for name in ("score_below", "score_at_least"):
        with pytest.raises(ValueError, match=rf"{name} is {bound}, but must be {allowed}\."):
            table.erase_if(**{name: bound})
