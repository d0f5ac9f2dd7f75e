"""Where a table remembers counts, ids that return get half of their counts back."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.tables import make
from torchrec_hkv import HKVOptions
from torchrec_hkv.hash_table import AgedLFU, HashTable, TableGroup, TableSpec, table_memory

PLENTY = 1 << 24
COUNTING = ("lfu", AgedLFU(2.0), "adaptive", "epoch_lfu")
UINT32_MAX = 2**32 - 1


def counts(table: HashTable) -> dict[int, int]:
    """Counts by id; under "epoch_lfu" the low half of the score."""
    found = {}
    for part in table.export():
        low = part.scores & UINT32_MAX if table.eviction == "epoch_lfu" else part.scores
        found |= dict(zip(part.ids.tolist(), low.tolist(), strict=True))
    return found


def restoring(device: str, capacity: int = 64, eviction="lfu", **options) -> HashTable:
    """A table that restores counts."""
    options = {"remember_evicted": PLENTY, "restore_counts": True} | options
    return make(device, capacity, eviction=eviction, **options)


class Model:
    """Counts by id, and half counts of ids that have left. The table decides which ids leave."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.halves: dict[int, int] = {}
        self.returned = 0

    def call(self, ids: list[int], given: list[int], held: set[int]) -> None:
        """Adds ``given`` to the counts of ``ids``; ``held`` are the ids in the table afterwards."""
        removed = {i: self.counts.pop(i) for i in set(self.counts) - held}
        for i, count in zip(ids, given, strict=True):
            if i not in held:
                continue  # refused
            if i not in self.counts:
                self.counts[i] = self.halves.get(i, 0)
                self.returned += i in self.halves
            self.counts[i] += count
        self.halves |= {i: min(count // 2, 65535) for i, count in removed.items()}


@pytest.mark.parametrize("eviction", COUNTING, ids=str)
@pytest.mark.parametrize("counted", [False, True])
def test_against_a_dictionary(device_type, eviction, counted):
    table, model = restoring(device_type, 128, eviction), Model()
    generator = torch.Generator().manual_seed(7)
    pool = torch.randint(-(1 << 63), (1 << 63) - 1, (500,), generator=generator)
    for step in range(60):
        ids = pool[(500 * torch.rand(50, generator=generator) ** 2).long()]
        given = torch.randint(0, 9, (50,), generator=generator) if counted else torch.ones(50)
        given = given.long()
        table.epoch = step // 20
        table.find_or_insert(ids.to(device_type), given.to(device_type) if counted else None)
        now = counts(table)
        model.call(ids.tolist(), given.tolist(), set(now))
        assert now == model.counts, step
    assert model.returned > 30
    assert table.counters()["returned"] == model.returned


def test_a_large_count_is_cut(device_type):
    table = restoring(device_type)
    ids = torch.arange(64, device=device_type)
    table.find_or_insert(ids, torch.full_like(ids, 10**9))
    table.find_or_insert(ids[:1] + 1000, torch.full_like(ids[:1], 2 * 10**9))
    (removed,) = set(range(64)) - set(counts(table))
    table.find_or_insert(ids[removed : removed + 1], ids[:1] + 3 * 10**9)
    assert counts(table)[removed] == 3 * 10**9 + 65535


def test_training_lookups(device_type):
    """In a group, only tables with the option restore counts."""
    specs = [
        TableSpec("a", 64, 4, eviction="lfu", remember_evicted=PLENTY, restore_counts=True),
        TableSpec("b", 64, 4, eviction="lfu", remember_evicted=PLENTY),
    ]
    group = TableGroup(specs, [0, 1], device=device_type)

    def call(ids: torch.Tensor) -> list[dict[int, int]]:
        ids, n = torch.cat([ids, ids]).to(device_type), len(ids)
        group.find_or_insert(ids, torch.arange(2 * n + 1, device=device_type), n)
        states = [group.export_table(table) for table in (0, 1)]
        return [
            dict(zip(s.ids[s.occupied].tolist(), s.scores[s.occupied].tolist(), strict=True))
            for s in states
        ]

    for _ in range(10):
        call(torch.arange(64))
    held = call(torch.arange(100, 164))
    assert not set(range(64)) & set(held[0])
    held = call(torch.arange(8))
    assert [held[0][i] for i in range(8)] == [6] * 8
    assert [held[1][i] for i in range(8)] == [1] * 8


def test_a_gpu_gives_what_a_cpu_gives(device_type):
    tables = [restoring(device, 512, remember_evicted=300) for device in ("cpu", device_type)]
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        ids = (3000 * torch.rand(400, generator=generator) ** 3).long()
        for table in tables:
            table.find_or_insert(ids.to(table.device))
    assert counts(tables[0]) == counts(tables[1])
    assert tables[0].counters()["returned"] == tables[1].counters()["returned"] > 100


def test_copies_remember(device_type):
    table = restoring(device_type)
    ids = torch.arange(70, device=device_type)
    for _ in range(4):
        table.find_or_insert(ids[:64])
    table.find_or_insert(ids[64:], torch.full_like(ids[64:], 9))
    removed = ids[~table.contains(ids)]
    other = copy.deepcopy(table)
    for one in (table, other):
        one.find_or_insert(removed, torch.full_like(removed, 5))  # fewer lookups would be refused
        assert {counts(one)[i] for i in removed.tolist()} == {5 + 2}
    table.clear()
    table.find_or_insert(ids[:3])
    assert counts(table) == {0: 1, 1: 1, 2: 1}


def test_memory_is_counted(device_type):
    plain = make(device_type, 1000, eviction="lfu")
    table = restoring(device_type, 1000, remember_evicted=4096)
    taken = [t._group.hbm_bytes(0) + t._group.host_bytes(0) for t in (plain, table)]
    assert taken[1] - taken[0] == 4 * 4096
    bytes_ = [
        table_memory(1000, 4, 0, "lfu", remember_evicted=n, restore_counts=n is not None).bytes
        for n in (None, 4096)
    ]
    assert bytes_[1] - bytes_[0] == 4 * 4096


def test_files_are_those_of_other_tables(device_type, tmp_path):
    table = restoring(device_type)
    table.find_or_insert(torch.arange(30, device=device_type))
    table.save(tmp_path / "t")
    other = HashTable.from_file(
        tmp_path / "t", device=device_type, remember_evicted=10, restore_counts=True
    )
    assert counts(other) == counts(table)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"restore_counts": True}, "remember_evicted is None, but only counts of"),
        ({"restore_counts": 1}, "restore_counts is 1, but must be True or False"),
        ({"restore_counts": True, "remember_evicted": 5, "eviction": "lru"}, "only 'lfu', 'adap"),
        ({"restore_counts": True, "remember_evicted": 5, "eviction": "epoch_lru"}, "count lookups"),
    ],
)
def test_impossible_options(options, match):
    given = {"eviction": "lfu"} | options
    for make_one in (lambda: HashTable(4, 100, **given), lambda: HKVOptions(**given)):
        with pytest.raises(ValueError, match=match):
            make_one()
