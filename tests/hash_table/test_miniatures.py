"""An adaptive table chooses its half-life by miniature tables, which agree with a model."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.miniature_model import CS, MiniaturesModel
from tests.support.tables import make, scores_of
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec, table_memory


class Modelled:
    """An adaptive table beside the model of its miniatures."""

    def __init__(self, table: HashTable) -> None:
        self.table = table
        self.miniatures = MiniaturesModel(table.capacity)
        self.aged = AgedLFUModel(3.0)
        self.calls = self.lookups = 0

    def call(self, ids: list[int], counts: list[int] | None) -> None:
        device = self.table.device
        scores = None if counts is None else torch.tensor(counts, device=device, dtype=torch.int64)
        self.table.find_or_insert(torch.tensor(ids, device=device, dtype=torch.int64), scores)
        self.calls += 1
        if ids:
            self.miniatures.begin_call(self.lookups)
            self.aged.c = self.miniatures.c
            self.aged.begin_call(self.calls, self.lookups, self.table.capacity)
            few = self.aged.lookups <= 8 * self.table.capacity * self.aged.steps
            if few and self.table.counters()["evicted"] > 0:
                self.miniatures.update(ids, counts or [1] * len(ids), self.calls, self.aged)
        self.lookups += len(ids)

    def check(self) -> None:
        group = self.table.group
        assert group.miniature_counters[0].tolist() == self.miniatures.tally
        assert group.aged_lfu[0, 0].item() == self.miniatures.c


def batch(generator: torch.Generator, n: int, base: int, width: int) -> list[int]:
    """Skewed ids from a moving range."""
    return ((torch.rand(n, generator=generator) ** 3 * width).long() + base).tolist()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    capacity=st.one_of(st.integers(1, 200), st.integers(900, 1200), st.just(9000)),
    seed=st.integers(0, 10_000),
    size=st.integers(0, 600),
    drift=st.sampled_from([0, 1, 30]),
    with_counts=st.booleans(),
)
def test_they_follow_the_model(capacity, seed, size, drift, with_counts):
    modelled = Modelled(HashTable(1, capacity, eviction="adaptive"))
    generator = torch.Generator().manual_seed(seed)
    for turn in range(40):
        n = int(torch.randint(0, size + 1, (1,), generator=generator))
        ids = batch(generator, n, drift * turn, 4 * capacity)
        counts = [id_ % 3 << id_ % 40 for id_ in ids] if with_counts else None
        modelled.call(ids, counts)
    modelled.check()


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [50, 300, 5000])
def test_they_follow_the_model_on_each_device(device_type, capacity):
    modelled = Modelled(make(device_type, capacity, eviction="adaptive"))
    generator = torch.Generator().manual_seed(7)
    for turn in range(60):
        modelled.call(batch(generator, capacity // 2, 5 * turn, 3 * capacity), None)
        if turn % 20 == 19:
            modelled.check()


def test_all_is_the_same_with_any_number_of_threads():
    tallies = []
    threads = torch.get_num_threads()
    for number in (1, 3):
        torch.set_num_threads(number)
        table = HashTable(1, 5000, eviction="adaptive")
        generator = torch.Generator().manual_seed(5)
        for turn in range(20):
            ids = torch.tensor(batch(generator, 9000, 100 * turn, 15_000))
            table.find_or_insert(ids)
        tallies.append((table.group.miniature_counters.tolist(), scores_of(table)))
    torch.set_num_threads(threads)
    assert tallies[0] == tallies[1]


def test_they_see_nothing_where_nothing_leaves_or_batches_are_much_too_large(device_type):
    roomy = make(device_type, 5000, eviction="adaptive")
    crowded = make(device_type, 40, eviction="adaptive")
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        ids = torch.tensor(batch(generator, 800, 0, 3000)).to(device_type)
        roomy.find_or_insert(ids)
        crowded.find_or_insert(ids)
    assert roomy.counters()["evicted"] == 0
    assert roomy.group.miniature_counters[0, :-1].eq(0).all()
    # Before its first call a table has no mean number of lookups.
    assert crowded.counters()["evicted"] > 0
    assert crowded.group.miniature_counters[0, :-1].eq(0).all()


def stream(replaced: bool) -> list[torch.Tensor]:
    """300 batches with popularity 1 / rank; all ids are replaced every 20 batches, or never."""
    generator = torch.Generator().manual_seed(2)
    weights = 1 / torch.arange(1, 6001).double()
    ranks = torch.multinomial(weights, 300 * 256, replacement=True, generator=generator)
    batches = ranks.view(300, 256)
    return [ids + (turn // 20 * 10_000 if replaced else 0) for turn, ids in enumerate(batches)]


def hit_rate(device: str, eviction: str, replaced: bool) -> tuple[HashTable, float]:
    table = make(device, 600, eviction=eviction)
    found = [table.find_or_insert(ids.to(device))[1] for ids in stream(replaced)]
    return table, torch.cat(found[60:]).float().mean().item()


def test_it_is_about_as_good_as_the_better_of_lru_and_lfu(device_type):
    for replaced, better, cs in [(False, "lfu", [16.0]), (True, "lru", [0.0, 1.0, 2.0])]:
        table, own = hit_rate(device_type, "adaptive", replaced)
        assert own > hit_rate(device_type, better, replaced)[1] - 0.01
        assert table.group.aged_lfu[0, 0].item() in cs


def test_other_tables_of_a_group_have_none(device_type):
    specs = [
        TableSpec("a", 300, 2, eviction="adaptive"),
        TableSpec("b", 300, 4, eviction="lru"),
        TableSpec("c", 3000, 2, eviction="adaptive"),
    ]
    group = TableGroup(specs, [0, 1, 2], device=device_type)
    alone = [make(device_type, spec.capacity, eviction=spec.eviction) for spec in specs]
    generator = torch.Generator().manual_seed(3)
    for turn in range(30):
        parts = [
            torch.tensor(batch(generator, spec.capacity, turn, 4 * spec.capacity)) for spec in specs
        ]
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0).to(device_type)
        group.find_or_insert_rows(torch.cat(parts).to(device_type), offsets, 1)
        for table, ids in zip(alone, parts, strict=True):
            table.find_or_insert(ids.to(device_type))
    for index, table in enumerate(alone):
        assert group.miniature_counters[index].equal(table.group.miniature_counters[0])
    assert group.miniature_counters[1].eq(0).all()


def test_a_copy_goes_on_alike(device_type):
    table, _ = hit_rate(device_type, "adaptive", replaced=True)
    other = copy.deepcopy(table)
    for ids in stream(replaced=False)[:50]:
        for its in (table, other):
            its.find_or_insert(ids.to(device_type))
    assert table.group.miniature_counters.equal(other.group.miniature_counters)
    assert table.group.aged_lfu.equal(other.group.aged_lfu)


def test_what_was_chosen_comes_out_of_a_file(device_type, tmp_path):
    table, _ = hit_rate(device_type, "adaptive", replaced=False)
    chosen = table.group.aged_lfu[0, 0].item()
    assert chosen in CS
    assert chosen != make(device_type, 600, eviction="adaptive").group.aged_lfu[0, 0].item()
    table.save(tmp_path / "table")
    loaded = make(device_type, 600, eviction="adaptive")
    loaded.load(tmp_path / "table")
    assert loaded.group.aged_lfu[0, 0].item() == chosen
    assert loaded.group.miniature_counters.eq(0).all()
    assert scores_of(loaded) == scores_of(table)


def test_clear_forgets(device_type):
    table, _ = hit_rate(device_type, "adaptive", replaced=False)
    table.clear()
    assert table.group.miniature_counters.eq(0).all()
    assert table.group.aged_lfu[0, 0].item() == 2.0


def test_c_is_not_to_be_set():
    with pytest.raises(ValueError, match="chooses its c itself"):
        HashTable(2, 64, eviction="adaptive").set_aging(3.0)


@pytest.mark.parametrize("capacity", [10, 1000, 100_000, 10_000_000])
def test_memory_is_declared(capacity):
    adaptive, lfu = (table_memory(capacity, 4, 0, eviction) for eviction in ("adaptive", "lfu"))
    more = adaptive.index_bytes - lfu.index_bytes
    assert more <= max(2 * adaptive.num_slots, 16_000)
    if capacity <= 100_000:
        tables = [HashTable(4, capacity, eviction=eviction) for eviction in ("adaptive", "lfu")]
        host_bytes = [table.group.host_bytes(0) for table in tables]
        assert host_bytes[0] - host_bytes[1] == more
