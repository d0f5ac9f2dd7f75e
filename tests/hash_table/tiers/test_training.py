"""Training a table with few rows in HBM equals training one with all rows in HBM."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import Bags, find, lookup, random_ids, rows_by_id
from tests.support.gpu import NEEDS_GPU
from tests.support.tiers import hbm_bytes_for, tiered_group
from torchrec_hkv.hash_table import (
    SGD,
    Adam,
    AgedLFU,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)

pytestmark = NEEDS_GPU


def skewed(n: int, pool: torch.Tensor) -> torch.Tensor:
    """Ids from a pool, some of them frequent."""
    ranks = torch.rand(n).pow(3).mul(len(pool)).long()
    return pool[ranks]


def batch(pool: torch.Tensor, bags: int = 400) -> Bags:
    lengths = torch.randint(0, 6, (bags,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return Bags(skewed(int(offsets[-1]), pool), offsets, bags).to("cuda")


def same_rows(groups) -> None:
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])


SHARES = [0.0, 0.01, 0.1, 0.5, 0.9]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "optimizer", [SGD(), RowWiseAdagrad(), Adam()], ids=["sgd", "rowwise_adagrad", "adam"]
)
@pytest.mark.parametrize("dim", [16, 5])
def test_steps(share, optimizer, dim):
    groups = [tiered_group(s, dim=dim, optimizer=optimizer) for s in (share, None)]
    pool = random_ids(5000)
    for _ in range(30):
        bags = batch(pool)
        grad = torch.randn(bags.batch_size, dim, device="cuda")
        outs = [lookup(group, bags) for group in groups]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(grad)
    if share != 0.9:  # where the whole pool fits
        assert (groups[0].counters()[0]["written_back"] > 0) == (share > 0)
    same_rows(groups)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_evictions(share, eviction):
    """A row is its initial row, less its training since its id was inserted."""
    group = tiered_group(share, eviction=eviction)
    pool = random_ids(9000).to("cuda")
    initial = initial_rows(pool, 16, table="t", initializer=Uniform(-1, 1)).double()
    rows = initial.clone()
    everything = Bags.flat(pool)
    for _ in range(40):
        removed = find(group, everything) < 0
        rows[removed] = initial[removed]
        drawn = torch.rand(1500, device="cuda").pow(3).mul(9000).long()
        bags = Bags(pool[drawn], torch.arange(0, 1501, 3, device="cuda"), 500)
        out = lookup(group, bags)
        expected = rows[drawn].reshape(500, 3, 16).sum(1).float()
        # A hot row takes 70 gradients a step.
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        grad = torch.randn(500, 16, device="cuda")
        out.backward(grad)
        rows.index_add_(0, drawn, grad.double().repeat_interleave(3, 0), alpha=-0.1)
    assert group.counters()[0]["evicted"] > 0


@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("eviction", ["lru", "lfu", AgedLFU(1.0), "adaptive", "epoch_lfu"])
def test_the_next_batches_are_looked_up_before_a_backward(share, eviction):
    """Rows of three batches await their backwards, more than there are frames."""
    groups = [
        tiered_group(s, capacity=20_000, optimizer=RowWiseAdagrad(), eviction=eviction)
        for s in (share, None)
    ]
    pool = random_ids(8000)
    waiting = []
    for step in range(40):
        bags = batch(pool)
        outs = [lookup(group, bags) for group in groups]
        if step >= 3:
            old, grad = waiting.pop(0)
            for out in old:
                out.backward(grad)
        waiting.append((outs, torch.randn(bags.batch_size, 16, device="cuda")))
    for old, grad in waiting:
        assert torch.equal(*old)
        for out in old:
            out.backward(grad)
    same_rows(groups)


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("finding", [1, 2])
def test_backwards_on_another_stream(share, finding):
    """A batch is found while the previous one is looked up and runs its backward.

    If two streams find batches, also while the previous batch's rows are fetched.
    """
    groups = [
        tiered_group(s, capacity=60_000, dim=64, optimizer=RowWiseAdagrad()) for s in (share, None)
    ]
    pool = random_ids(40_000)
    training = torch.cuda.Stream()
    streams = [torch.cuda.Stream() for _ in range(finding)]
    batches = [batch(pool, 8000) for _ in range(25)]
    grads = [torch.randn(8000, 64, device="cuda") for _ in batches]
    torch.cuda.synchronize()
    for group in groups:
        anchor = torch.empty(0, device="cuda", requires_grad=True)
        rate = torch.tensor(0.1, device="cuda")
        found = None
        for k in range(len(batches) + 1):
            ahead = None
            if k < len(batches):
                stream = streams[k % finding]
                with torch.cuda.stream(stream):
                    pin = group.pin()
                    bags = batches[k]
                    slots = group.find_or_insert(bags.ids, bags.offsets, bags.batch_size, pin)
                    ahead = (bags, slots, pin, stream.record_event())
            if found is not None:
                bags, slots, pin, event = found
                with torch.cuda.stream(training):
                    training.wait_event(event)
                    out = group.pooled_lookup(
                        anchor, bags.ids, bags.offsets, None, slots, 8000, False, pin, rate
                    )
                    out.backward(grads[k - 1])
                    slots.record_stream(training)
            found = ahead
        torch.cuda.synchronize()
    same_rows(groups)


def test_evaluation_moves_nothing():
    group = tiered_group(0.1)
    pool = random_ids(5000)
    lookup(group, batch(pool))
    before = group.counters()[0]
    for _ in range(3):
        bags = batch(pool)
        slots = find(group, bags)
        anchor = torch.empty(0, device="cuda")
        group.pooled_lookup(
            anchor, bags.ids, bags.offsets, None, slots, bags.batch_size, False, None,
            torch.tensor(0.1, device="cuda"),
        )  # fmt: skip
    after = group.counters()[0]
    assert (after["fetched"], after["written_back"]) == (before["fetched"], before["written_back"])


def test_a_captured_step():
    """A replayed graph moves rows like eager steps."""
    groups = [tiered_group(0.05, optimizer=RowWiseAdagrad()) for _ in range(2)]
    pool = random_ids(6000).to("cuda")
    ids = torch.empty(800, dtype=torch.int64, device="cuda")
    offsets = torch.arange(0, 801, 2, device="cuda")
    bags = Bags(ids, offsets, 400)
    grad = torch.randn(400, 16, device="cuda")
    for group in groups:
        ids.copy_(pool[:800])
        lookup(group, bags).backward(grad)
    graph = torch.cuda.CUDAGraph()
    ids.copy_(pool[800:1600])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        lookup(groups[0], bags).backward(grad)
    for _ in range(12):
        ids.copy_(pool[torch.randint(0, 6000, (800,), device="cuda")])
        graph.replay()
        lookup(groups[1], bags).backward(grad)
    torch.cuda.synchronize()
    same_rows(groups)


@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize("dim", [16, 128])  # rows copied by lanes, and in bulk
def test_lookups_that_are_dropped(share, dim):
    """New ids, two streams in turn; every third lookup is neither pooled nor followed by a
    backward."""
    groups = [
        tiered_group(s, capacity=40_000, dim=dim, optimizer=RowWiseAdagrad()) for s in (share, None)
    ]
    pool = random_ids(30_000)
    main, *streams = (torch.cuda.Stream() for _ in range(3))
    batches = [batch(pool, 3000) for _ in range(40)]
    grad = torch.randn(3000, dim, device="cuda")
    torch.cuda.synchronize()
    for group in groups:
        anchor = torch.empty(0, device="cuda", requires_grad=True)
        rate = torch.tensor(0.1, device="cuda")
        kept = []  # used on several streams
        for k, bags in enumerate(batches):
            stream = streams[k % 2]
            with torch.cuda.stream(stream):
                pin = group.pin()
                slots = group.find_or_insert(bags.ids, bags.offsets, bags.batch_size, pin)
                found = stream.record_event()
            kept.append(slots)
            if k % 3 == 2:
                del pin
                continue
            with torch.cuda.stream(main):
                main.wait_event(found)
                group.pooled_lookup(
                    anchor, bags.ids, bags.offsets, None, slots, 3000, False, pin, rate
                ).backward(grad)
        torch.cuda.synchronize()
    if share:
        assert groups[0].counters()[0]["written_back"] > 0
    same_rows(groups)


@pytest.mark.parametrize(
    "dims", [(64, 128, 100), (128, 5, 16), (512,)], ids=["in_bulk", "by_lanes", "long"]
)
def test_tables_of_several_widths(dims):
    """Frames of all tables are filled in one order; the last table is in HBM."""
    capacities = [40_000, 9000, 20_000, 6400]
    shares = [0.05, 0.3, 0.1]
    groups = []
    for tiered in (True, False):
        specs = [
            TableSpec(
                f"t{t}",
                capacity,
                dim,
                hbm_bytes=hbm_bytes_for(share, capacity, dim, 1) if tiered else None,
                initializer=Uniform(-1, 1),
            )
            for t, (capacity, dim, share) in enumerate(zip(capacities, dims, shares, strict=False))
        ]
        specs.append(TableSpec("in_hbm", capacities[-1], 32, initializer=Uniform(-1, 1)))
        groups.append(TableGroup(specs, list(range(len(specs))), RowWiseAdagrad(), device="cuda"))
    tables = len(dims) + 1
    pools = [random_ids(int(0.7 * c)) for c in (*capacities[: len(dims)], capacities[-1])]
    for _ in range(25):
        ids = torch.cat([skewed(1500, pool) for pool in pools])
        offsets = torch.arange(0, tables * 1500 + 1, 3)
        bags = Bags(ids, offsets, 500).to("cuda")
        outs = [lookup(group, bags) for group in groups]
        assert torch.equal(*outs)
        grad = torch.randn_like(outs[0])
        for out in outs:
            out.backward(grad)
    for t in range(tables):
        rows = [rows_by_id(group, t) for group in groups]
        assert rows[0].keys() == rows[1].keys()
        assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])
        written = groups[0].counters()[t]["written_back"]
        assert (written > 0) == (t < len(dims))
