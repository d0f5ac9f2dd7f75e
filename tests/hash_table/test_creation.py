"""Creating a huge table is instant: the host does not visit its buckets."""

import time

import pytest
import torch

from tests.support.gpu import needs_gpu
from tests.support.tables import distinct_ids, expected_initial_rows
from torchrec_hkv.hash_table import HashTable, Uniform


def make_and_use(device: str, capacity: int, seconds: float) -> None:
    start = time.perf_counter()
    table = HashTable(1, capacity, device=device, initializer=Uniform(-1, 1))
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    assert taken < seconds
    assert table.num_slots == table.capacity >= capacity
    ids = distinct_ids(1000, device)
    rows, found = table.find_or_insert(ids)
    assert not found.any()
    assert torch.equal(rows, expected_initial_rows(table, ids))
    assert table.contains(ids).all()
    assert table.size == 1000


@pytest.mark.slow
def test_10_to_the_8_slots_on_a_cpu():
    """1.8 GB, of which only pages with an id are touched."""
    make_and_use("cpu", 10**8, 2)


def test_10_to_the_8_slots_that_grow():
    table = HashTable(1, 10**8, initial_capacity=1000, initializer=Uniform(-1, 1))
    assert table.num_slots < 10**5
    ids = distinct_ids(1000, "cpu")
    table.find_or_insert(ids)
    start = time.perf_counter()
    table.reserve(10**6)
    assert time.perf_counter() - start < 2
    assert 10**6 < table.num_slots < 4 * 10**6
    assert table.contains(ids).all()


@needs_gpu
def test_10_to_the_9_slots_on_a_gpu():
    HashTable(1, 1000, device="cuda")  # the first table initializes CUDA
    make_and_use("cuda", 10**9, 2)


@needs_gpu
def test_10_to_the_9_slots_that_grow():
    table = HashTable(1, 10**9, device="cuda", initial_capacity=10**6)
    ids = distinct_ids(100_000, "cuda")
    table.find_or_insert(ids)
    start = time.perf_counter()
    table.reserve(table.capacity)
    assert time.perf_counter() - start < 10
    assert table.num_slots == table.capacity >= 10**9
    assert table.contains(ids).all()
    assert table.size == 100_000
