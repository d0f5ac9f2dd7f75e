"""Deterministic calls on a GPU do not make the host wait, and can be replayed by a CUDA graph."""

import pytest
import torch

from tests.hash_table.test_no_host_wait import OPERATIONS
from tests.support.batches import Bags, lookup
from tests.support.gpu import NEEDS_GPU, no_waits
from tests.support.power_law_bags import power_law_bags
from tests.support.table_model import POLICIES
from tests.support.table_states import assert_same_states
from tests.support.tables import constant_scores, distinct_ids, make, random_rows
from torchrec_hkv.hash_table import MinFrequency, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU


class Case:
    """Arguments of an operation."""

    def __init__(self, table):
        self.ids = distinct_ids(600, "cuda")  # more than the table holds, after two calls
        self.rows = random_rows(table, 600)
        self.belief = torch.arange(600, device="cuda") < 300
        self.scores = constant_scores(table, 600)


@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation, policy):
    table = make("cuda", 1000, 8, eviction=policy, deterministic=True, remember_evicted=100)
    cases = [Case(table) for _ in range(4)]
    OPERATIONS[operation](table, cases[0])
    torch.cuda.synchronize()
    with no_waits():
        for case in cases[1:]:
            OPERATIONS[operation](table, case)
            table.find_or_insert(case.ids, case.scores)


def make_group():
    specs = [
        TableSpec(
            f"t{t}",
            capacity,
            8,
            initializer=Uniform(-1, 1),
            deterministic=True,
            admission=MinFrequency(2, entries=128) if t else None,
        )
        for t, capacity in enumerate((700, 300))
    ]
    return TableGroup(specs, [0, 1], RowWiseAdagrad(), device="cuda")


def step(group, bags):
    out = lookup(group, bags)
    out.backward(out.detach().cos())
    return out.detach()


def batch_of(number):
    """A batch of constant shape: bags of three ids."""
    ids = power_law_bags(number, 2, 400, 3000, longest=20).ids[: 2 * 200 * 3]
    return Bags(ids.cuda(), torch.arange(401, device="cuda") * 3, 200)


def test_training_does_not_wait():
    group = make_group()
    batches = [batch_of(number) for number in range(6)]
    step(group, batches[0])
    torch.cuda.synchronize()
    with no_waits():
        for bags in batches[1:]:
            step(group, bags)


def test_a_graph_s_replays_are_eager_steps():
    group, twin = make_group(), make_group()
    static = batch_of(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            static.ids.copy_(batch_of(number).ids)
            step(group, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(group, static)
    for number in range(3):
        step(twin, batch_of(number))
    for number in range(3, 20):
        bags = batch_of(number)
        static.ids.copy_(bags.ids)
        graph.replay()
        assert torch.equal(out, step(twin, bags)), number
    assert_same_states(group, twin)
    assert group.counters()[0]["evicted"] > 0
