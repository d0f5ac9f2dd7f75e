"""Rows go home beside other calls, before they leave HBM: nothing but time depends on it."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from tests.support.gpu import NEEDS_GPU
from tests.support.tiers import tiered_group
from torchrec_hkv.hash_table import Adam, RowWiseAdagrad

pytestmark = NEEDS_GPU

DIM = 128


def groups_of(capacity: int = 80_000, **options):
    """One with a twentieth of its rows in HBM, and one with all."""
    return [tiered_group(share, capacity, DIM, **options) for share in (0.05, None)]


def batch(pool: torch.Tensor, n: int = 20_000) -> Bags:
    drawn = torch.rand(n, device="cuda").pow(2).mul(len(pool)).long()
    return Bags(pool[drawn], torch.arange(0, n + 1, 2, device="cuda"), n // 2)


def train(group, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
    out = lookup(group, bags)
    out.backward(grad)
    return out


def same_rows(groups) -> None:
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(), Adam()], ids=["rowwise_adagrad", "adam"])
def test_calls_in_between(eviction, optimizer):
    """Calls that write rows by themselves, free them or read them come while others go home."""
    groups = groups_of(eviction=eviction, optimizer=optimizer)
    pool = random_ids(50_000).to("cuda")
    grad = torch.randn(10_000, DIM, device="cuda")
    for step in range(24):
        bags = batch(pool)
        torch.cuda.synchronize()
        # No wait of the host's: the device is busy with the rows of the lookup.
        given = pool[torch.randint(len(pool), (3000,), device="cuda")].unique()
        rows = torch.randn(len(given), DIM, device="cuda")
        end = torch.tensor([0, len(given)], device="cuda")
        outs, read = [], []
        for group in groups:
            outs.append(train(group, bags, grad))
            if step % 4 == 1:
                group.insert_or_assign(given, end, 1, rows)
            if step % 4 == 2:
                group.erase(given, end, 1)
            if step % 4 == 3:
                group.accum_or_assign(given, end, 1, rows, group.contains(given, end, 1))
            read.append(group.find_rows(bags.ids, bags.offsets, bags.batch_size)[0])
        assert torch.equal(*outs)
        assert torch.equal(*read)
    same_rows(groups)


def test_rows_that_would_leave_next_are_written_too():
    """Each changed row goes home once, some of them before they have to."""
    group = tiered_group(0.1, 64_000, DIM, optimizer=RowWiseAdagrad())
    pool = random_ids(32_000).to("cuda")
    grad = torch.ones(2000, DIM, device="cuda")
    parts = [Bags.flat(part) for part in pool.split(2000)]
    for bags in parts:
        train(group, bags, grad)
    counted = [group.counters()[0]]
    for bags in parts:
        train(group, bags, grad)
        counted.append(group.counters()[0])
    moved = [
        tuple(after[name] - before[name] for name in ("fetched", "written_home"))
        for before, after in itertools.pairwise(counted)
    ]
    fetched = sum(rows for rows, _ in moved)
    assert fetched > 20_000
    # All frames had new rows; what came was changed, and left once.
    assert sum(rows for _, rows in moved) <= fetched + 6500
    assert any(written > came for came, written in moved)


def test_a_graph_that_is_captured_between_steps():
    """Once there is a graph, rows go home in the calls that need their frames alone."""
    groups = groups_of(optimizer=RowWiseAdagrad())
    pool = random_ids(50_000).to("cuda")
    grad = torch.randn(10_000, DIM, device="cuda")
    for _ in range(4):
        bags = batch(pool)
        for group in groups:
            train(group, bags, grad)
    static = batch(pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lookup(groups[0], static).backward(grad)
    for step in range(12):
        bags = batch(pool)
        if step % 3 == 0:
            train(groups[0], bags, grad)
        else:
            static.ids.copy_(bags.ids)
            graph.replay()
        train(groups[1], bags, grad)
    torch.cuda.synchronize()
    same_rows(groups)


def test_a_group_that_is_dropped_while_rows_go_home():
    pool = random_ids(50_000).to("cuda")
    grad = torch.randn(10_000, DIM, device="cuda")
    for _ in range(3):
        group = tiered_group(0.05, 80_000, DIM, optimizer=RowWiseAdagrad())
        for _ in range(3):
            train(group, batch(pool), grad)
        del group
    torch.cuda.synchronize()
