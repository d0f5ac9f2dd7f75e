"""A training lookup refuses new ids that rank below all entries that they could replace.

Only tables that rank by decayed counts do. A new id counts as looked up four times, in this step.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.batches import Bags, insert, lookup, random_ids
from torchrec_hkv.hash_table import SGD, AgedLFU, TableGroup, TableSpec, Uniform, initial_rows

DIM = 4
ROWS = Uniform(-1, 1)


def make(device, eviction, capacity=64):
    spec = TableSpec("t", capacity, DIM, eviction, initializer=ROWS, deterministic=device == "cuda")
    return TableGroup([spec], [0], SGD(), device=device)


def counts_of(group):
    state = group.export_table(0)
    return dict(
        zip(state.ids[state.occupied].tolist(), state.scores[state.occupied].tolist(), strict=True)
    )


class Model:
    """A table in which every id may take every slot: count and last step by id."""

    def __init__(self, c, slots):
        self.aged, self.slots = AgedLFUModel(c), slots
        self.entries = {}
        self.steps = self.lookups = self.refused = 0

    def step(self, ids, after):
        """``after`` has the ids in the table, which decide between entries of equal rank."""
        self.steps += 1
        self.aged.begin_call(self.steps, self.lookups, self.slots)
        self.lookups += len(ids)
        missing = [id_ for id_ in ids if id_ not in self.entries]
        for id_ in ids:
            if id_ in self.entries:
                self.entries[id_] = (self.entries[id_][0] + 1, self.steps)
        left = sorted(
            (
                (self.aged.rank(count, last), last, id_ in after, id_)
                for id_, (count, last) in self.entries.items()
                if last < self.steps
            ),
            reverse=True,
        )
        for id_ in missing:
            if id_ in self.entries:
                self.entries[id_] = (self.entries[id_][0] + 1, self.steps)
                continue
            if len(self.entries) == self.slots:
                if not left or left[-1][0] > self.aged.rank_of_new(self.steps):
                    self.refused += 1
                    continue
                del self.entries[left.pop()[-1]]
            self.entries[id_] = (1, self.steps)


@pytest.mark.parametrize("capacity", [64, 128])
@pytest.mark.parametrize("c", [0.0, 0.5, 3.0, 16.0])
def test_equal_to_a_dictionary(device_type, c, capacity):
    group = make(device_type, AgedLFU(c), capacity)
    model = Model(c, capacity)
    pool = random_ids(6 * capacity)
    for step in range(60):
        n = int(torch.randint(1, 2 * capacity, ()))
        ids = pool[(torch.rand(n) ** 3 * len(pool)).long()]
        if step % 7 == 0:  # a scan of ids that do not return
            ids = random_ids(capacity)
        insert(group, Bags.flat(ids).to(device_type))
        after = counts_of(group)
        model.step(ids.tolist(), after)
        assert {id_: count for id_, (count, _) in model.entries.items()} == after
    assert group.counters()[0]["refused"] == model.refused > 0


def filled(device, eviction):
    """A table of ids that were looked up in each of 20 steps."""
    group = make(device, eviction)
    ids = random_ids(64)
    for _ in range(20):
        insert(group, Bags.flat(ids).to(device))
    return group, set(ids.tolist())


@pytest.mark.parametrize("eviction", [AgedLFU(3.0), "adaptive"], ids=str)
def test_refused_ids_read_their_initial_rows(device_type, eviction):
    group, there = filled(device_type, eviction)
    before = group.export_table(0).rows
    ids = random_ids(40)
    out = lookup(group, Bags(ids, torch.arange(41), 40).to(device_type))
    assert torch.equal(out.detach().cpu(), initial_rows(ids, DIM, table="t", initializer=ROWS))
    out.sum().backward()
    assert torch.equal(group.export_table(0).rows, before)
    assert counts_of(group).keys() == there
    assert group.counters()[0]["refused"] == 40


def test_counts_decay_until_new_ids_have_room(device_type):
    group, there = filled(device_type, AgedLFU(1.0))
    # More than log2(20) half-lives of 64 lookups each.
    for _ in range(60):
        ids = random_ids(16)
        insert(group, Bags.flat(ids).to(device_type))
    assert not there & counts_of(group).keys()
    assert set(ids.tolist()) <= counts_of(group).keys()


@pytest.mark.parametrize(
    "eviction", ["lru", "lfu", "epoch_lru", "epoch_lfu", AgedLFU(math.inf)], ids=str
)
def test_other_policies_insert_every_new_id(device_type, eviction):
    group, _ = filled(device_type, eviction)
    ids = random_ids(40)
    insert(group, Bags.flat(ids).to(device_type))
    state = group.export_table(0)
    assert set(ids.tolist()) <= set(state.ids[state.occupied].tolist())
    assert group.counters()[0]["refused"] == 0
