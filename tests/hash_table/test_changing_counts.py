"""The right entry leaves after any changes of counts and of c."""

import copy
import math

import pytest
import torch

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.batches import Bags, insert, random_ids
from tests.support.tables import distinct_ids, make, scores_of
from torchrec_hkv.hash_table import SGD, AgedLFU, HashTable, TableGroup, TableSpec

#: Half-lives in lookups per slot.
C = [0.0, 0.3, 2.0, 40.0, 1e4, 1e9, math.inf]


class Model:
    """One or two buckets, so that each id may take every slot. Count and last step by id."""

    def __init__(self, table: HashTable, c: float) -> None:
        self.table, self.aged = table, AgedLFUModel(c)
        self.entries: dict[int, tuple[int, int]] = {}
        self.calls = self.lookups = self.evicted = 0

    def call(self, ids: list[int], counts: list[int]) -> None:
        """A call with present ids, or with a new one."""
        table, device = self.table, self.table.device
        table.find_or_insert(torch.tensor(ids, device=device), torch.tensor(counts, device=device))
        self.calls += 1
        self.aged.begin_call(self.calls, self.lookups, table.capacity)
        self.lookups += len(ids)
        before = {id_: self.rank(id_) for id_ in self.entries}
        there = set(scores_of(table))
        for id_, count in zip(ids, counts, strict=True):
            old = self.entries.get(id_, (0, 0))[0]
            self.entries[id_] = (min(old + count, 2**63 - 1), self.calls)
        if len(self.entries) <= table.capacity:
            return
        lowest = min(before.values())
        if self.rank(ids[0])[0] < lowest[0]:
            assert ids[0] not in there
            del self.entries[ids[0]]
            return
        (removed,) = self.entries.keys() - there
        assert before[removed] == lowest
        self.evicted += 1
        del self.entries[removed]

    def rank(self, id_: int) -> tuple[int, int]:
        count, step = self.entries[id_]
        return self.aged.rank(count, step), step

    def some(self, n: int) -> list[int]:
        """Some present ids."""
        ids = list(self.entries)
        return [ids[at] for at in torch.randperm(len(ids))[:n]]


def counts(n: int) -> list[int]:
    """Counts, mostly small."""
    return [min(int(2 ** (60 * x)), 2**60) for x in (torch.rand(n) ** 6).tolist()]


@pytest.mark.parametrize("capacity", [5, 64, 77, 128])
@pytest.mark.parametrize("c", C)
def test_counts_and_c_change_on_the_way(device_type, capacity, c):
    model = Model(make(device_type, capacity, dim=1, eviction=AgedLFU(c)), c)
    new = iter(random_ids(2000).unique().tolist())
    for _ in range(4 * capacity + 40):
        if len(model.entries) == capacity and torch.rand(()) < 0.5:
            ids = model.some(int(torch.randint(1, 1 + capacity // 3, ())))
            model.call(ids, counts(len(ids)))
        if torch.rand(()) < 0.05:
            model.aged.c = C[int(torch.randint(len(C), ()))]
            model.table.set_aging(model.aged.c)
        model.call([next(new)], counts(1))
    assert model.evicted > 0
    assert scores_of(model.table) == {id_: count for id_, (count, _) in model.entries.items()}


def full(device: str, high: bool) -> tuple[TableGroup, torch.Tensor]:
    """A full table, after some evictions, and its ids ordered by last lookup."""
    spec = TableSpec("t", 64, 2, AgedLFU(2.0), deterministic=device == "cuda")
    group = TableGroup([spec], [0], SGD(), device=device)
    ids = distinct_ids(68, "cpu")
    for id_ in ids:
        insert(group, Bags.flat(id_.repeat(50 if high else 1)).to(device))
    return group, ids[-64:]


@pytest.mark.parametrize("copied", [False, True])
def test_loaded_counts_are_lower_than_those_before(device_type, copied):
    group, _ = full(device_type, high=True)
    low, ids = full(device_type, high=False)
    group.load_table(0, low.export_table(0))
    if copied:
        group = copy.deepcopy(group)
    # The first id is looked up again; the second one leaves.
    insert(group, Bags.flat(ids[:1]).to(device_type))
    insert(group, Bags.flat(random_ids(1)).to(device_type))
    state = group.export_table(0)
    assert set(ids.tolist()) - set(state.ids[state.occupied].tolist()) == {ids[1].item()}


def test_others_take_the_places_of_high_counts(device_type):
    """Counts of evicted ids do not affect new ids in the same slots."""
    table = make(device_type, 64, dim=1, eviction=AgedLFU(5.0))
    model = Model(table, 5.0)
    ids = distinct_ids(400, "cpu").tolist()
    for id_ in ids[:100]:
        model.call([id_], [1000])
    table.erase(torch.tensor(list(model.entries), device=device_type))
    model.entries.clear()
    for id_ in ids[100:]:
        model.call([id_], [1])
    assert model.evicted == (100 - 64) + (300 - 64)
