"""Where a table remembers evictions, it counts evicted ids that return."""

import pytest
import torch

from tests.support.batches import Bags, insert
from tests.support.tables import contents, make, random_rows
from torchrec_hkv.hash_table import SGD, HashTable, TableGroup, TableSpec, table_memory

PLENTY = 1 << 24


def draws(seed, pool, n, device):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (pool,), generator=generator)
    return ids[torch.randint(pool, (n,), generator=generator)].to(device)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "customized"])
@pytest.mark.parametrize("how", ["find_or_insert", "insert_or_assign", "insert_and_evict"])
def test_against_a_set(eviction, how, device_type):
    """Reads which ids came and left from the table after each call; ids repeat within calls."""
    table = make(device_type, 128, eviction=eviction, remember_evicted=PLENTY)
    removed, returned, held = set(), 0, set()
    for step in range(30):
        ids = draws(step % 7, 400, 40, device_type)
        scores = None
        if eviction == "customized":
            scores = torch.full_like(ids, step)
        rows = random_rows(table, len(ids))
        if how == "find_or_insert":
            table.find_or_insert(ids, scores)
        else:
            getattr(table, how)(ids, rows, scores)
        now = set(contents(table))
        returned += len((now - held) & removed)
        removed |= held - now
        held = now
    assert returned > 50
    assert table.counters()["returned"] == returned


def test_tables_of_a_group_remember_by_themselves(device_type):
    specs = [
        TableSpec("a", 64, 4, remember_evicted=PLENTY),
        TableSpec("b", 64, 4),
        TableSpec("c", 64, 4, remember_evicted=PLENTY),
    ]
    group = TableGroup(specs, [0, 1, 2], SGD(), device=device_type)
    offsets = torch.tensor([0, 40, 80, 120], device=device_type)

    def call(first):
        parts = [torch.arange(40, device=device_type) + start for start in first]
        insert(group, Bags(torch.cat(parts), offsets, 1))

    for first in ([0, 0, 0], [40, 40, 40], [80, 80, 80], [120, 120, 0]):
        call(first)
    evicted = [table["evicted"] for table in group.counters()]
    returned = [table["returned"] for table in group.counters()]
    assert evicted[0] == evicted[1] > 64
    # The third table has evicted all of its first ids.
    assert returned == [0, 0, 40]


def test_the_last_to_use_an_entry_is_remembered(device_type):
    table = make(device_type, 64, remember_evicted=1)
    ids = torch.arange(70, device=device_type)

    def returned_by(id_):
        before = table.counters()["returned"]
        table.find_or_insert(ids[id_ : id_ + 1])
        return table.counters()["returned"] - before

    for part in ids[:64].split(1):
        table.find_or_insert(part)
    assert returned_by(64) == 0  # 0 leaves
    table.erase(ids[64:65])
    assert returned_by(0) == 1
    assert returned_by(65) == 0  # 1 leaves
    assert returned_by(66) == 0  # 2 leaves
    table.erase(ids[65:67])
    assert returned_by(1) == 0
    assert returned_by(2) == 1
    assert returned_by(67) == 0  # 3 leaves
    # A call looks up returns before it records evictions: 4 leaves for 3 and takes its entry.
    assert returned_by(3) == 1


def test_how_long_evictions_are_remembered(device_type):
    """After as many evictions as there are entries, 1/e of the ids are remembered."""
    entries = 8192
    table = make(device_type, 1024, remember_evicted=entries)
    first = torch.arange(512, device=device_type)
    table.find_or_insert(first)
    fresh = torch.arange(1000, 1_000_000, device=device_type).split(256)
    at = 0
    while table.contains(first).any():
        table.find_or_insert(fresh[at])
        at += 1
    until = table.counters()["evicted"] + entries
    while table.counters()["evicted"] < until:
        table.find_or_insert(fresh[at])
        at += 1
    before = table.counters()["returned"]
    table.find_or_insert(first)
    assert 0.25 < (table.counters()["returned"] - before) / len(first) < 0.45


def test_new_ids_seldom_seem_to_return(device_type):
    """With all entries taken, one new id in 65,535 counts as returned."""
    table = make(device_type, 1024, dim=1, remember_evicted=512)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (2_000_000,), generator=generator)
    for part in ids.to(device_type).split(500):
        table.find_or_insert(part)
    assert table.counters()["inserted"] > 1_900_000
    assert 8 < table.counters()["returned"] < 65  # 30 expected


def test_clearing_forgets(device_type):
    table = make(device_type, 64, remember_evicted=1000)
    ids = torch.arange(200, device=device_type)
    for part in ids.split(50):
        table.find_or_insert(part)
    table.clear()
    table.find_or_insert(ids[:50])
    assert table.counters()["returned"] == 0


def test_memory_is_counted(device_type):
    tables = [make(device_type, 1000, remember_evicted=n) for n in (None, 4096)]
    plain, remembering = (t._group.hbm_bytes(0) + t._group.host_bytes(0) for t in tables)
    assert remembering - plain == 2 * 4096
    bytes_ = [table_memory(1000, 4, 0, "lru", remember_evicted=n).bytes for n in (None, 4096)]
    assert bytes_[1] - bytes_[0] == 2 * 4096


@pytest.mark.parametrize("number", [0, -1, (1 << 32) + 1, 1.5, True])
def test_impossible_numbers(number):
    with pytest.raises(ValueError, match=r"remember_evicted is .*, but must be a number of ids"):
        HashTable(4, 100, remember_evicted=number)
