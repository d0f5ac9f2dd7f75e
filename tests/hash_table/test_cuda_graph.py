"""A training step captured in a CUDA graph equals an eager step, including new ids."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.support.batches import Bags, find, insert, lookup, random_ids, rate, rows_by_id
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform, initial_rows

pytestmark = NEEDS_GPU

DIM = 8


def make(capacity: int, eviction: str = "lru") -> TableGroup:
    spec = TableSpec("t", capacity, DIM, eviction, initializer=Uniform(-1, 1))
    return TableGroup([spec], [0], RowWiseAdagrad(), device="cuda")


def one_a_bag(ids: Tensor) -> Bags:
    return Bags(ids, torch.arange(len(ids) + 1, device="cuda"), len(ids))


def step(group: TableGroup, bags: Bags, grad: Tensor) -> Tensor:
    out = lookup(group, bags)
    out.backward(grad)
    return out.detach()


@dataclasses.dataclass
class Captured:
    """A step on static ids."""

    group: TableGroup
    bags: Bags
    grad: Tensor
    graph: torch.cuda.CUDAGraph
    out: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        self.bags.ids.copy_(ids)
        self.graph.replay()
        return self.out


def capture(group: TableGroup, first: list[Tensor]) -> Captured:
    """Runs the first batches eagerly, as PyTorch requires, and captures one step."""
    bags = one_a_bag(first[0].clone())
    grad = torch.ones(len(first[0]), DIM, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for ids in first:
            bags.ids.copy_(ids)
            step(group, bags, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(group, bags, grad)
    return Captured(group, bags, grad, graph, out)


def compare(capacity: int, eviction: str, batches: list[Tensor]) -> TableGroup:
    group, twin = make(capacity, eviction), make(capacity, eviction)
    captured = capture(group, batches[:3])
    for ids in batches[:3]:
        step(twin, one_a_bag(ids), captured.grad)
    for at, ids in enumerate(batches[3:]):
        expected = step(twin, one_a_bag(ids), captured.grad)
        assert torch.equal(captured(ids), expected), at
    assert group.clock == twin.clock == len(batches)
    assert group.counters() == twin.counters()
    rows, expected_rows = rows_by_id(group), rows_by_id(twin)
    assert rows.keys() == expected_rows.keys()
    assert all(torch.equal(row, expected_rows[id_]) for id_, row in rows.items())
    return group


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_batches_of_new_and_old_ids(eviction):
    pool = random_ids(20_000).to("cuda")
    batches = [pool[torch.randint(0, 500 * (at + 1), (700,), device="cuda")] for at in range(40)]
    group = compare(40_000, eviction, batches)
    assert group.counters()[0]["inserted"] > 8000


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_evictions(eviction):
    """One id a step, so that only one entry can leave."""
    pool = random_ids(400).to("cuda")
    at = torch.arange(600) // 2 + torch.randint(0, 60, (600,))
    group = compare(64, eviction, list(pool[at.to("cuda")].split(1)))
    assert group.counters()[0]["evicted"] > 100


def test_evictions_of_whole_batches():
    """Each batch is new and replaces an old one; no id is refused."""
    group = make(640)
    batches = [random_ids(150).to("cuda") for _ in range(40)]
    captured = capture(group, batches[:3])
    for ids in batches[3:]:
        expected = initial_rows(ids, DIM, table="t", initializer=Uniform(-1, 1))
        assert torch.equal(captured(ids), expected)
        assert (find(group, one_a_bag(ids)) >= 0).all()
    counters = group.counters()[0]
    assert counters["refused"] == 0
    assert counters["evicted"] >= 37 * 150 - 640


def test_a_replay_leaves_no_pin():
    """The next eager call may evict rows that a replayed step has trained."""
    group = make(64)
    ids = random_ids(64 * 8).to("cuda").split(64)
    captured = capture(group, ids[:3])
    for part in ids[3:6]:
        captured(part)
        insert(group, one_a_bag(ids[6]))
        assert rows_by_id(group).keys() == set(ids[6].tolist())
    assert group.counters()[0]["refused"] == 0


def test_an_eager_lookup_keeps_its_pin_over_replays():
    group = make(64)
    ids = random_ids(400).to("cuda")
    captured = capture(group, list(ids[:96].split(32)))
    out = lookup(group, one_a_bag(ids[100:130]))
    for part in ids[130:290].split(32):
        captured(part)
    kept = rows_by_id(group)
    assert kept.keys() >= set(ids[100:130].tolist())
    before = torch.stack([kept[id_] for id_ in ids[100:130].tolist()])
    assert torch.equal(before, out.detach().cpu())
    out.backward(torch.ones_like(out))
    after = rows_by_id(group)
    # The first step of row-wise Adagrad on ones moves each value by the learning rate.
    for id_, row in zip(ids[100:130].tolist(), before, strict=True):
        torch.testing.assert_close(after[id_], row - 0.1)
    insert(group, one_a_bag(ids[300:364]))
    assert rows_by_id(group).keys() == set(ids[300:364].tolist())


def test_a_pin_noted_before_the_capture_ends():
    """The first replay releases the last eager backward's pin, although no eager call follows."""
    group = make(64)
    ids = random_ids(64 * 6).to("cuda").split(64)
    captured = capture(group, ids[:3])
    for part in ids[3:]:
        captured(part)
    assert group.counters()[0]["refused"] == 0
    assert rows_by_id(group).keys() == set(ids[-1].tolist())


def test_evaluation_in_a_graph():
    group = make(1000)
    ids = random_ids(300).to("cuda")
    step(group, one_a_bag(ids[:200]), torch.ones(200, DIM, device="cuda"))
    bags = one_a_bag(ids[:100].clone())
    anchor, none = torch.empty(0, device="cuda"), rate(0.0, group)

    def evaluate() -> Tensor:
        slots = find(group, bags)
        return group.pooled_lookup(
            anchor, bags.ids, bags.offsets, None, slots, 100, False, None, none
        )

    evaluate()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = evaluate()
    for first in (0, 50, 150, 200):
        bags.ids.copy_(ids[first : first + 100])
        graph.replay()
        assert torch.equal(out, evaluate())
    assert group.counters()[0]["size"] == 200
