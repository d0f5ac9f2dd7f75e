"""CUDA graphs of growing tables."""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.saved_tables import entries
from tests.support.tables import distinct_ids, make

pytestmark = NEEDS_GPU


def test_an_insertion_into_a_table_that_may_grow_is_not_captured():
    table = make("cuda", 4000, initial_capacity=100)
    ids = distinct_ids(50, "cuda")
    table.find_or_insert(ids)
    before = entries(table)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="reserve its whole capacity before capturing")
    with refused, torch.cuda.graph(graph):
        table.find_or_insert_slots(ids)
    torch.cuda.synchronize()
    assert entries(table) == before


def test_a_captured_find_sees_a_table_that_has_grown():
    table = make("cuda", 20_000, initial_capacity=100)
    ids = distinct_ids(10_000, "cuda")
    table.find_or_insert(ids[:50])
    requested = ids[:200].clone()
    table.find_slots(requested)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = table.find_slots(requested)
    for part in ids.split(1000):
        table.find_or_insert(part)
        graph.replay()
        assert torch.equal(slots, table.find_slots(requested))
    assert table.num_slots == table.capacity
    assert int(slots.min()) >= 0
