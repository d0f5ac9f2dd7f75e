"""Batches of thousands of ids that repeat early, late, always or never.

On a CPU a find searches once for ids that repeat within a part of the batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.batches import Bags, find, insert, random_ids
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform

POOL = 12_000
CAPACITY = 1 << 14


def frequent_first(n: int) -> Tensor:
    """Roughly a power law: the i-th of POOL indices has a frequency of 1 / i."""
    return (POOL ** torch.rand(n, dtype=torch.float64)).long() - 1


def different(n: int) -> Tensor:
    return torch.randperm(POOL)[:n]


#: Indices into the pool of ids, for one feature.
STREAMS = {
    "always": lambda: frequent_first(20_000),
    "late": lambda: torch.cat([different(600), frequent_first(9_000)]),
    "early": lambda: torch.cat([frequent_first(6_000), different(11_000)]),
    "never": lambda: different(7_000),
    "one id": lambda: torch.full((5_000,), 7),
    "just one more than another": lambda: torch.cat([frequent_first(512 + 4096), different(1)]),
}


def make(eviction: str) -> TableGroup:
    specs = [
        TableSpec(name, CAPACITY, 2, initializer=Uniform(-1, 1), eviction=eviction)
        for name in ("a", "b")
    ]
    return TableGroup(specs, [0, 1, 0], SGD())


def features(parts: list[Tensor]) -> Bags:
    """One bag for each feature."""
    lengths = torch.tensor([0, *(len(part) for part in parts)])
    return Bags(torch.cat(parts), lengths.cumsum(0), 1)


def assert_at(group: TableGroup, slots: Tensor, parts: list[Tensor]) -> None:
    """Every id is in its slot."""
    of_feature = slots.split([len(part) for part in parts])
    for table, part, of_part in zip((0, 1, 0), parts, of_feature, strict=True):
        ids = group.export_table(table).ids
        assert torch.equal(ids[of_part - table * len(ids)], part)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("stream", STREAMS)
def test_every_position_gets_its_slot(stream, eviction):
    """Half of the ids are present, the others are new."""
    group = make(eviction)
    pool = random_ids(POOL)
    parts = [pool[STREAMS[stream]()] for _ in range(3)]
    bags = features(parts)
    known = [part[: len(part) // 2] for part in parts]
    insert(group, features(known))
    of_table = [set(torch.cat(known[::2]).tolist()), set(known[1].tolist())]
    is_known = [
        torch.tensor([id_ in of_table[table] for id_ in part.tolist()])
        for table, part in zip((0, 1, 0), parts, strict=True)
    ]

    found = find(group, bags)
    assert torch.equal(found >= 0, torch.cat(is_known))
    before = group.counters()
    slots = insert(group, bags)
    assert_at(group, slots, parts)
    assert torch.equal(found[found >= 0], slots[found >= 0])
    for table, counted in enumerate(group.counters()):
        own = torch.cat(is_known[::2]) if table == 0 else is_known[1]
        assert counted["lookups"] - before[table]["lookups"] == len(own)
        assert counted["hits"] - before[table]["hits"] == int(own.sum())
    assert torch.equal(find(group, bags), slots)


@pytest.mark.parametrize("stream", STREAMS)
def test_lfu_counts_every_position(stream):
    group = make("lfu")
    pool = random_ids(POOL)
    parts = [pool[STREAMS[stream]()] for _ in range(3)]
    for _ in range(2):
        insert(group, features(parts))
    for table, own in ((0, torch.cat(parts[::2])), (1, parts[1])):
        state = group.export_table(table)
        occupied = state.occupied
        ids, scores = state.ids[occupied], state.scores[occupied]
        expected, counts = own.unique(return_counts=True)
        order = ids.argsort()
        assert torch.equal(ids[order], expected)
        assert torch.equal(scores[order], 2 * counts)


def test_lru_touches_what_repeats():
    """Ids of every batch keep their slots while twice the capacity of other ids passes through."""
    group = make("lru")
    pool = random_ids(4 * CAPACITY)
    other = pool[:5]
    insert(group, features([pool[:CAPACITY], other, other]))
    many = pool[torch.randint(200, (9_000,))]
    slots = insert(group, features([many, other, other]))[: len(many)]
    for start in range(CAPACITY, 3 * CAPACITY, 1024):
        part = torch.cat([many, pool[start : start + 1024]])
        insert(group, features([part, other, other]))
    assert group.counters()[0]["evicted"] > CAPACITY
    assert torch.equal(find(group, features([many, other, other]))[: len(many)], slots)
