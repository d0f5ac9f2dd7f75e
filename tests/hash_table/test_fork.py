"""A table in a forked child, which lacks the parent's threads."""

import multiprocessing

import pytest
import torch

from tests.support.batches import Bags, find, insert, random_ids
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec

SECONDS = 30


def put_slots(group: TableGroup, bags: Bags, more: Bags, results) -> None:
    found, placed = find(group, bags), insert(group, more)
    # Not by torch, whose child would wait for threads of the parent forever.
    results.put((found.tolist(), int((placed.numpy() >= 0).sum())))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork"
)
def test_a_child_of_a_process_that_has_used_its_threads():
    group = TableGroup([TableSpec("t", 1 << 17, 2)], [0], SGD())
    ids = random_ids(90_000)
    bags, more = Bags.flat(ids[:50_000]), Bags.flat(ids[50_000:])
    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))
    try:
        slots = insert(group, bags)
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        child = fork.Process(target=put_slots, args=(group, bags, more, results), daemon=True)
        child.start()
        found, placed = results.get(timeout=SECONDS)
        child.join(SECONDS)
    finally:
        torch.set_num_threads(threads)
    assert child.exitcode == 0
    assert found == slots.tolist()
    assert placed == 40_000
    assert torch.equal(find(group, bags), slots)  # the parent's threads still work
    assert int((find(group, more) >= 0).sum()) == 0
