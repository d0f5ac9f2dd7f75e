"""Which rows are fetched into HBM, and which are written back."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids
from tests.support.gpu import NEEDS_GPU
from tests.support.tables import distinct_ids
from tests.support.tiers import hbm_bytes_for, tiered_group
from torchrec_hkv.hash_table import HashTable

pytestmark = NEEDS_GPU

CAPACITY = 64_000


def moved(group, ids: torch.Tensor) -> tuple[int, int]:
    """(rows fetched, rows written back) of one training lookup."""
    before = group.counters()[0]
    insert(group, Bags.flat(ids))
    after = group.counters()[0]
    return after["fetched"] - before["fetched"], after["written_back"] - before["written_back"]


def test_hot_rows_stay():
    """After two lookups, nearly all of a set of ids half as large as the frames are in HBM."""
    group = tiered_group(0.1, CAPACITY)
    ids = distinct_ids(CAPACITY // 2, "cuda")
    for part in ids.split(4000):
        insert(group, Bags.flat(part))
    hot = ids[torch.randperm(len(ids), device="cuda")[:3200]]
    first, _ = moved(group, hot)
    assert first > 2000
    for _ in range(3):
        again, _ = moved(group, hot)
        assert again < 32


def test_only_what_has_changed_is_written_back():
    group = tiered_group(0.1, CAPACITY)
    ids = distinct_ids(CAPACITY // 2, "cuda")
    for part in ids.split(4000):
        insert(group, Bags.flat(part))
    # These lookups replace all new, changed rows in HBM.
    for _ in range(3):
        for part in ids.split(4000):
            insert(group, Bags.flat(part))
    for part in ids[:20_000].split(4000):
        fetched, written = moved(group, part)
        assert fetched > 3000
        assert written == 0
    bags = Bags.flat(ids[:2000])
    lookup(group, bags).sum().backward()
    written = sum(moved(group, part)[1] for _ in range(4) for part in ids[4000:].split(4000))
    assert 1900 < written <= 2000


def test_frequent_rows_are_not_replaced_by_rare_ones():
    group = tiered_group(0.1, CAPACITY, eviction="lfu")
    ids = distinct_ids(CAPACITY // 2, "cuda")
    hot, cold = ids[:2000], ids[2000:]
    for _ in range(10):
        insert(group, Bags.flat(hot))
    for part in cold.split(4000):
        insert(group, Bags.flat(part))
    assert moved(group, hot)[0] < 40


def test_rows_touched_again_outlast_rows_touched_once():
    group = tiered_group(0.1, CAPACITY)
    ids = distinct_ids(CAPACITY // 2, "cuda")
    for part in ids.split(4000):
        insert(group, Bags.flat(part))
    hot, cold = ids[:2000], ids[2000:]
    for _ in range(3):
        insert(group, Bags.flat(hot))
    # Five times as many rows as frames; a call has fewer than one for each set.
    for part in cold.split(500):
        insert(group, Bags.flat(part))
    assert moved(group, hot)[0] < 100


def test_a_loaded_table_has_its_hottest_rows_in_hbm(tmp_path):
    """After a load, the ids that were looked up last need no fetch."""
    dim = 8
    table = HashTable(dim, CAPACITY, device="cuda")
    ids = distinct_ids(40_000, "cuda")
    for part in ids.split(2000):
        table.find_or_insert(part)
    table.save(tmp_path)
    tiered = HashTable.from_file(
        tmp_path, device="cuda", hbm_bytes=hbm_bytes_for(0.2, CAPACITY, dim)
    )
    rows = table.find(ids)[0]
    assert torch.equal(tiered.find(ids)[0], rows)
    before = tiered.counters()["fetched"]
    assert torch.equal(tiered.find_or_insert(ids[-4000:])[0], rows[-4000:])
    assert tiered.counters()["fetched"] - before < 200


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_half_floats_of_odd_dims(share):
    """Rows of 3 x 2 bytes are copied in pieces of two bytes."""
    tables = [
        HashTable(
            3,
            CAPACITY,
            dtype=torch.bfloat16,
            device="cuda",
            hbm_bytes=None if s is None else CAPACITY * 14 + int(s * CAPACITY * 9) + 20_000,
        )
        for s in (share, None)
    ]
    ids = distinct_ids(90_000, "cuda")
    for _ in range(3):
        for part in ids.split(7000):
            part = part[torch.randperm(len(part), device="cuda")]
            rows = [table.find_or_insert(part)[0] for table in tables]
            assert torch.equal(*rows)
    if share:
        assert tables[0].counters()["written_back"] > 0


def test_a_table_without_frames():
    group = tiered_group(0.0)
    ids = random_ids(1000).to("cuda")
    insert(group, Bags.flat(ids))
    insert(group, Bags.flat(ids))
    counters = group.counters()[0]
    assert (counters["fetched"], counters["written_back"]) == (0, 0)
    assert counters["host_hits"] == counters["hits"] >= 900


def test_hits_by_memory():
    """A row that was fetched counts as a hit in host memory once, and then in HBM."""
    group = tiered_group(0.1, CAPACITY)
    ids = distinct_ids(CAPACITY // 2, "cuda")
    for part in ids.split(4000):
        insert(group, Bags.flat(part))
    hot = ids[torch.randperm(len(ids), device="cuda")[:3200]]

    def counted() -> tuple[int, int, int]:
        before = group.counters()[0]
        insert(group, Bags.flat(hot))
        after = group.counters()[0]
        return tuple(after[name] - before[name] for name in ("hits", "host_hits", "fetched"))

    hits, on_host, fetched = counted()
    assert hits == 3200
    assert fetched <= on_host <= hits
    assert on_host > 2000
    for _ in range(3):
        hits, on_host, fetched = counted()
        assert hits == 3200
        # Sets of seven frames serve 3.5 rows on average, but some need more. By a Poisson
        # distribution, one row in a hundred is in excess.
        assert fetched <= on_host < 320
