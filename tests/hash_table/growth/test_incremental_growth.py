"""On a CPU a large table doubles incrementally while in use, and agrees with a dictionary."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.batches import Bags, find, insert, random_ids, rate, rows_by_id
from tests.support.growing_tables import check_buckets, ids_of_one_bucket
from tests.support.saved_tables import entries, like
from tests.support.tables import contents, distinct_ids, make
from torchrec_hkv.hash_table import HashTable, RowWiseAdagrad, TableGroup, TableSpec, Uniform

#: 66 buckets at first, and 528 in the end.
INITIAL, CAPACITY = 4_200, 33_600
OPERATIONS = ("insert", "insert", "insert", "insert", "look up", "erase", "read", "copy", "reserve")


def is_splitting(table: HashTable) -> bool:
    return table._group._group.splitting()


def rows_of(ids: Tensor) -> Tensor:
    return torch.stack([ids % 8191, ids % 127], dim=1).float()


def check_found(table: HashTable, counts: dict[int, int]) -> None:
    """All ids are found, each in its own slot, with their rows, and no other ids."""
    ids = torch.tensor(list(counts), dtype=torch.int64)
    slots = table.find_slots(ids)
    assert (slots >= 0).all()
    assert len(slots.unique()) == len(ids) == table.size
    rows, found = table.find(ids)
    assert found.all()
    assert torch.equal(rows, rows_of(ids))
    assert not table.contains(distinct_ids(100, "cpu")).any()


def assign(table: HashTable, counts: Counter[int], ids: Tensor) -> None:
    assert table.insert_or_assign(ids, rows_of(ids)).all()
    counts.update(ids.tolist())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 1500)), max_size=40),
)
def test_against_a_dictionary(seed, steps):
    torch.manual_seed(seed)
    table = make("cpu", CAPACITY, 2, eviction="lfu", initial_capacity=INITIAL)
    counts: Counter[int] = Counter()
    fresh = distinct_ids(CAPACITY, "cpu")
    assign(table, counts, fresh[:3_600])
    new = 3_600
    for what, n in steps:
        known = torch.tensor(list(counts))
        some = known[torch.randperm(len(known))[:n]]
        if what == "insert" and new + n < 0.9 * CAPACITY:
            assign(table, counts, torch.cat([fresh[new : new + n], some[: n // 2]]))
            new += n
        elif what == "look up":
            assign(table, counts, some)
        elif what == "erase":
            table.erase(some)
            for id_ in some.tolist():
                del counts[id_]
        elif what == "read":
            read = contents(table)
            assert {id_: score for id_, (_, score, _) in read.items()} == counts
        elif what == "copy":
            table = copy.deepcopy(table)
        elif what == "reserve":
            table.reserve(min(CAPACITY, len(counts) + n))
        check_found(table, counts)
        if not counts:
            break
    assert table.counters()["evicted"] == table.counters()["refused"] == 0


def half_split(**options: object) -> tuple[HashTable, Counter[int]]:
    """A table in the middle of doubling, with ids that have counts."""
    table = make("cpu", CAPACITY, 2, eviction="lfu", initial_capacity=INITIAL, **options)
    counts: Counter[int] = Counter()
    for ids in distinct_ids(7_000, "cpu").split(50):
        assign(table, counts, ids)
        if is_splitting(table) and table.num_slots > 8_000:
            return table, counts
    raise AssertionError("it never was in the middle of growing")


def test_it_takes_several_calls():
    table = make("cpu", CAPACITY, 2, initial_capacity=INITIAL)
    counts: Counter[int] = Counter()
    moved = splitting = 0
    for ids in distinct_ids(int(0.9 * CAPACITY), "cpu").split(20):
        before = table._group.growths
        assign(table, counts, ids)
        moved += table._group.growths > before
        splitting += is_splitting(table)
        if is_splitting(table):
            check_found(table, counts)
    # A call splits at least 64 of 66, 132 and 264 buckets.
    assert splitting >= 1 + 2 + 4
    assert moved >= splitting + 3
    assert table.num_slots == table.capacity
    check_found(table, counts)


def test_calls_with_as_many_new_ids_split_as_many_buckets():
    table = make("cpu", 400_000, 2, initial_capacity=200_000)
    slots, ids = table.num_slots, distinct_ids(200_000, "cpu")
    begin = slots * 7 // 8 - 100
    table.insert_or_assign(ids[:begin], rows_of(ids[:begin]))
    lowest = []  # the lowest slot of the upper half, which fills from its end
    for new in ids[begin:].split(400):
        batch = torch.cat([new, ids[torch.randint(begin, (600,))]])
        table.insert_or_assign(batch, rows_of(batch))
        taken = table._group.select_slots(0)
        lowest.append(int(taken[taken >= slots].amin()))
        if lowest[-1] < slots + 64 * 64:
            break
    assert len(lowest) > 10
    # A call with 400 new ids splits 400 / (slots / 16) of all buckets. The first has none before
    # it.
    split = -torch.tensor(lowest[1:-1]).diff() / 64
    assert (split - 2 * slots / 64 * 400 / (slots / 16)).abs().amax() < 40


def test_large_batches_end_it_at_once():
    table, counts = half_split()
    slots = table.num_slots
    assign(table, counts, distinct_ids(slots // 2 + slots // 4, "cpu"))
    assert not is_splitting(table)
    assert table.num_slots == 2 * slots
    check_found(table, counts)


def test_ids_of_one_bucket():
    """Both hashes of these ids give one bucket, so they may be in the next one."""
    buckets = 132
    table = make("cpu", 4 * 64 * buckets, 2, eviction="lfu", initial_capacity=64 * buckets)
    counts: Counter[int] = Counter()
    for bucket in range(0, buckets, 2):
        some = list(itertools.islice(ids_of_one_bucket(buckets, bucket), 104))
        for part in torch.tensor(some).split(16):
            assign(table, counts, part)
    assert not is_splitting(table)
    splits = 0
    for ids in distinct_ids(1_400, "cpu").split(20):
        assign(table, counts, ids)
        check_found(table, counts)
        splits += is_splitting(table)
    assert splits >= 2
    assert not is_splitting(table)
    assert table.counters()["evicted"] == 0
    ids = torch.tensor(list(counts))
    check_buckets(table, dict(zip(counts, table.find_slots(ids).tolist(), strict=True)))


def test_a_file_holds_a_whole_table(tmp_path):
    table, counts = half_split()
    table.save(tmp_path / "table")
    assert not is_splitting(table)
    loaded = like(table, initial_capacity=INITIAL)
    loaded.load(tmp_path / "table")
    assert entries(loaded) == entries(table)
    check_found(loaded, counts)


def test_loads_into_a_table_that_grows(tmp_path):
    small = make("cpu", CAPACITY, 2, eviction="lfu", initial_capacity=INITIAL)
    assign(small, counts := Counter(), distinct_ids(100, "cpu"))
    small.save(tmp_path / "table")
    table, _ = half_split()
    table.load(tmp_path / "table")
    assert not is_splitting(table)
    check_found(table, counts)


def test_a_cleared_table_is_empty():
    table, _ = half_split()
    table.clear()
    assert not is_splitting(table)
    assert table.size == 0
    assign(table, counts := Counter(), distinct_ids(5_000, "cpu"))
    check_found(table, counts)


def test_nothing_grows_where_nothing_may_change():
    table, counts = half_split()
    with table._group.unchanged():
        assert not is_splitting(table)
        with table._group.unchanged():
            check_found(table, counts)


def test_expired_entries_leave():
    table, counts = half_split(expire_after=300)
    old = torch.tensor(list(counts))
    kept = old[:100]
    for _ in range(400):
        table.find_or_insert(kept)
    assert table.size == 100
    assert table.contains(kept).all()


def test_pending_backwards_find_their_rows():
    groups = []
    ids = random_ids(6_000)
    bags = Bags.random(1, 300, ids[:3_500])
    grad = torch.randn(300, 4)
    for initial in (INITIAL, None):
        spec = TableSpec("t", CAPACITY, 4, initializer=Uniform(-1, 1), initial_capacity=initial)
        group = TableGroup([spec], [0], RowWiseAdagrad(), "cpu")
        groups.append(group)
        for part in ids[:3_500].split(500):
            insert(group, Bags.flat(part))
        for part in ids[3_500:].split(50):
            pin = group.pin()
            slots = group.find_or_insert(bags.ids, bags.offsets, bags.batch_size, pin)
            anchor = torch.empty(0, requires_grad=True)
            of_call = (bags.ids, bags.offsets, None, slots, bags.batch_size, False, pin)
            out = group.pooled_lookup(anchor, *of_call, rate(0.1, group))
            insert(group, Bags.flat(part))
            out.backward(grad)
        assert (find(group, Bags.flat(ids)) >= 0).all()
    assert groups[0].growths >= 2
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])
