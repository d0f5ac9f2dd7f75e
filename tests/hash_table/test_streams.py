"""Calls on several CUDA streams give the results of sequential calls; the host never waits."""

import pytest
import torch

from tests.support.batches import Bags, find, random_ids, rate
from tests.support.gpu import NEEDS_GPU
from tests.support.tables import distinct_ids, make, random_rows
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform, initial_rows

pytestmark = NEEDS_GPU

INITIALIZER = Uniform(-1, 1)


@pytest.fixture
def streams():
    torch.cuda.synchronize()
    yield torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()


def test_insert_on_one_find_on_another(streams):
    table = make("cuda", 400_000, 32)
    parts = distinct_ids(300_000, "cuda").split(10_000)
    rows = [random_rows(table, 10_000) for _ in parts]
    torch.cuda.synchronize()
    results = []
    for ids, given in zip(parts, rows, strict=True):
        with torch.cuda.stream(streams[0]):
            table.insert_or_assign(ids, given)
        with torch.cuda.stream(streams[1]):
            results.append(table.find(ids))
    torch.cuda.synchronize()
    for given, (read, found) in zip(rows, results, strict=True):
        assert found.all()
        assert torch.equal(read, given)


def test_rows_are_read_before_they_change(streams):
    """The writer on the other stream waits for the reader."""
    table = make("cuda", 100_000, 64)
    ids = distinct_ids(50_000, "cuda")
    rows = [random_rows(table, len(ids)) for _ in range(30)]
    table.insert_or_assign(ids, rows[0])
    slots = table.find_slots(ids)
    torch.cuda.synchronize()
    results = []
    for new in rows[1:]:
        with torch.cuda.stream(streams[1]):
            results.append(table.group._gather(ids, None, 1, slots)[0])
        with torch.cuda.stream(streams[0]):
            table.assign_rows(ids, new)
    torch.cuda.synchronize()
    for expected, read in zip(rows, results, strict=False):
        assert torch.equal(read, expected)


def test_evictions_on_one_reads_on_another(streams):
    """In a full table, a found id has its own row, never a half-written one or another id's."""
    table = make("cuda", 6400, 64)
    parts = distinct_ids(64_000, "cuda").split(3200)
    expected = [initial_rows(ids, 64, table="table", initializer=INITIALIZER) for ids in parts]
    torch.cuda.synchronize()
    results = []
    for at, ids in enumerate(parts):
        with torch.cuda.stream(streams[0]):
            table.find_or_insert_slots(ids)
        with torch.cuda.stream(streams[1]):
            results += [(back, *table.find(parts[back])) for back in range(max(0, at - 2), at + 1)]
    torch.cuda.synchronize()
    for back, read, _ in results:  # an evicted id reads as its initial row
        assert torch.equal(read, expected[back])
    newest = [found for back, _, found in results[-1:]]
    assert newest[0].all()


def test_backward_on_one_next_insertion_on_another(streams):
    """Prefetching: each batch is new, so rows are initial ones, and are trained once."""
    side, main = streams
    n, dim, rounds = 5000, 32, 40
    spec = TableSpec("t", 6 * n, dim, initializer=INITIALIZER)
    group = TableGroup([spec], [0], SGD(), device="cuda")
    offsets = torch.arange(n + 1, device="cuda")
    batches = [Bags(random_ids(n).to("cuda"), offsets, n) for _ in range(rounds)]
    expected = [initial_rows(b.ids, dim, table="t", initializer=INITIALIZER) for b in batches]
    half = rate(0.5, group)
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    torch.cuda.synchronize()

    def prefetch(bags):
        with torch.cuda.stream(side):
            pin = group.pin()
            slots = group.find_or_insert(bags.ids, bags.offsets, n, pin)
            return pin, slots, side.record_event()

    outs, trained = [], []
    ready = prefetch(batches[0])
    kept = []  # both streams use slots
    for at, bags in enumerate(batches):
        pin, slots, event = ready
        kept.append(slots)
        if at + 1 < rounds:
            ready = prefetch(batches[at + 1])
        with torch.cuda.stream(main):
            main.wait_event(event)
            out = group.pooled_lookup(
                anchor, bags.ids, bags.offsets, None, slots, n, False, pin, half
            )
            outs.append(out.detach())
            out.backward(torch.ones_like(out))
            del out, pin
            with torch.no_grad():
                slots = find(group, bags)
                trained.append(
                    group.pooled_lookup(
                        anchor.detach(), bags.ids, offsets, None, slots, n, False, None, half
                    )
                )
    torch.cuda.synchronize()
    for initial, out, after in zip(expected, outs, trained, strict=True):
        assert torch.equal(out, initial)
        assert torch.equal(after, initial - 0.5)
    counters = group.counters()[0]
    assert counters["refused"] == 0
    assert counters["evicted"] > 0
    assert group.clock == rounds


def test_a_lookup_does_not_wait_for_an_insertion_that_ends_other_pins(streams):
    """A lookup's own pin holds its rows, and so does a backward's."""
    side, main = streams
    n, dim = 2000, 32
    group = TableGroup([TableSpec("t", 20 * n, dim)], [0], SGD(), device="cuda")
    offsets = torch.arange(n + 1, device="cuda")
    batches = [Bags(random_ids(n).to("cuda"), offsets, n) for _ in range(6)]
    half = rate(0.5, group)
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    ones = torch.ones(n, dim, device="cuda")

    def found(bags):
        with torch.cuda.stream(side):
            pin = group.pin()
            return bags, group.find_or_insert(bags.ids, offsets, n, pin), pin

    def train(bags, slots, pin):
        with torch.cuda.stream(main):
            group.pooled_lookup(
                anchor, bags.ids, offsets, None, slots, n, False, pin, half
            ).backward(ones)

    # The first run, without a delay, loads kernels and allocates memory.
    for delay, (first, second, third) in ((0, batches[:3]), (400_000_000, batches[3:])):
        first, second = found(first), found(second)
        torch.cuda.synchronize()
        train(*first)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(delay)
        third = found(third)  # releases the first pin
        inserted = side.record_event()
        train(*second)
        trained = main.record_event()
        trained.synchronize()
        assert delay == 0 or not inserted.query()
        torch.cuda.synchronize()
        train(*third)
        torch.cuda.synchronize()
        del first, second, third
    assert group.counters()[0]["size"] == 6 * n


def test_memory_outlives_the_calls_on_it(streams):
    """The memory of a deleted table is not reused while another stream still reads it."""
    for _ in range(5):
        table = make("cuda", 1 << 16, 64)
        ids = distinct_ids(1 << 15, "cuda")
        expected = table.find_or_insert(ids)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(50_000_000)
            read, _ = table.find(ids)
        del table
        poison = [torch.full((1 << 16, 64), float("nan"), device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert torch.equal(read, expected)
        del poison
