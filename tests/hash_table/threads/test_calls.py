"""Calls of several threads on one table give the results of sequential calls."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.table_observation import joined
from tests.support.tables import contents, make

THREADS, ROUNDS = 4, 60


def run_threads(run: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            run(index)
        except BaseException as error:  # the test's thread raises it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("initial_capacity", [None, 64])
def test_insertions(device_type, initial_capacity):
    """All ids arrive once, with their rows, although threads insert the same ids."""
    table = make(device_type, 100_000, dim=5, initial_capacity=initial_capacity)
    ids = torch.randperm(60_000, device=device_type).split(60_000 // ROUNDS)

    def insert(index: int) -> None:
        for at in range(ROUNDS):
            part = ids[(at + index * 7) % ROUNDS]
            table.insert_or_assign(part, part[:, None].expand(-1, 5).float())

    run_threads(insert)
    entries = joined(table.export())
    assert torch.equal(entries.ids.sort().values.cpu(), torch.arange(60_000))
    assert torch.equal(entries.rows, entries.ids[:, None].expand(-1, 5).float())
    assert table.counters()["inserted"] == 60_000
    assert table.counters()["evicted"] == 0


def test_counts_add_up(device_type):
    table = make(device_type, 1000, eviction="lfu", initial_capacity=64)
    ids = torch.arange(500, device=device_type)

    def count(_: int) -> None:
        for _ in range(ROUNDS):
            table.find_or_insert(ids)

    run_threads(count)
    assert {score for _, score, _ in contents(table).values()} == {THREADS * ROUNDS}


def test_sums(device_type):
    """accum_or_assign takes several launches; other threads' calls do not come between."""
    table = make(device_type, 1000, dim=4, initial_capacity=64)
    ids = torch.arange(300, device=device_type)
    table.insert_or_assign(ids, torch.zeros(300, 4, device=device_type))

    def add(_: int) -> None:
        ones = torch.ones(300, 4, device=device_type)
        for _ in range(ROUNDS):
            table.accum_or_assign(ids, ones, torch.ones_like(ids, dtype=torch.bool))

    run_threads(add)
    assert (table.find(ids)[0] == THREADS * ROUNDS).all()


def test_finds_beside_evictions(device_type):
    """A found id has its own row, never that of an id that took its slot."""
    table = make(device_type, 640, dim=4)

    def use(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for _ in range(ROUNDS):
            ids = torch.randint(0, 5000, (400,), generator=generator).to(device_type)
            expected = ids[:, None].expand(-1, 4).float()
            if index % 2 == 0:
                table.insert_or_assign(ids, expected.contiguous())
            else:
                rows, found = table.find(ids)
                assert torch.equal(rows[found], expected[found])

    run_threads(use)


def test_a_thread_that_holds_the_table_must_not_change_it(device_type):
    table = make(device_type, 64)
    ids = torch.arange(5, device=device_type)
    table.find_or_insert(ids)
    with table.group.unchanged():
        for change in (table.find_or_insert, table.erase):
            with pytest.raises(RuntimeError, match="by the thread that is saving or exporting it"):
                change(ids)
        assert table.find(ids)[1].all()
        assert table.size == 5
    table.erase(ids)
    assert table.size == 0


def test_holds_nest(device_type):
    table = make(device_type, 64)
    ids = torch.arange(5, device=device_type)
    with table.group.alone(), table.group.alone():
        table.find_or_insert(ids)
        with table.group.unchanged(), table.group.unchanged():
            assert table.size == 5
        table.erase(ids)
    assert table.size == 0


def test_others_wait_until_a_hold_ends(device_type):
    table = make(device_type, 64)
    done = threading.Event()

    def insert() -> None:
        table.find_or_insert(torch.arange(5, device=device_type))
        done.set()

    thread = threading.Thread(target=insert)
    with table.group.unchanged():
        thread.start()
        assert not done.wait(0.2)
        assert table.size == 0
    thread.join(30)
    assert done.is_set()
    assert table.size == 5
