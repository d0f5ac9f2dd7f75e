"""Warm calls on a GPU do not make the host wait."""

import types

import pytest
import torch

from tests.support.batches import Bags, find, lookup, random_ids, rate
from tests.support.gpu import NEEDS_GPU, no_waits
from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, distinct_ids, make, random_rows
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

# `c` holds ids, rows, belief and, under "customized", scores.
OPERATIONS = {
    "find": lambda t, c: t.find(c.ids),
    "find_slots": lambda t, c: t.find_slots(c.ids),
    "contains": lambda t, c: t.contains(c.ids),
    "find_or_insert": lambda t, c: t.find_or_insert(c.ids, c.scores),
    "find_or_insert_slots": lambda t, c: t.find_or_insert_slots(c.ids, c.scores),
    "insert_or_assign": lambda t, c: t.insert_or_assign(c.ids, c.rows, c.scores),
    "insert_and_evict": lambda t, c: t.insert_and_evict(c.ids, c.rows, c.scores, trim=False),
    "accum_or_assign": lambda t, c: t.accum_or_assign(c.ids, c.rows, c.belief, c.scores),
    "assign": lambda t, c: t.assign(c.ids, c.rows, c.scores),
    "assign_rows": lambda t, c: t.assign_rows(c.ids, c.rows),
    "assign_scores": lambda t, c: t.assign_scores(c.ids, c.scores),
    "erase": lambda t, c: t.erase(c.ids),
    "next epoch": lambda t, c: setattr(t, "epoch", t.epoch + 1),
}


def test_a_wait_would_be_seen():
    one = torch.ones(1, device="cuda")
    with no_waits(), pytest.raises(RuntimeError, match="synchron"):
        one.item()


@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation, policy):
    table = make("cuda", 1000, 8, eviction=policy)
    cases = []
    for _ in range(4):
        ids = distinct_ids(600, "cuda")  # more than the table holds, after two calls
        belief = torch.arange(600, device="cuda") < 300
        scores = constant_scores(table, 600)
        cases.append(
            types.SimpleNamespace(
                ids=ids, rows=random_rows(table, 600), belief=belief, scores=scores
            )
        )
    call = OPERATIONS[operation]
    call(table, cases[0])
    torch.cuda.synchronize()
    with no_waits():
        for case in cases[1:]:
            call(table, case)
            table.find_or_insert(case.ids, case.scores)


GROUP_OPERATIONS = {
    "find_rows": [],
    "contains": [],
    "find_or_insert_rows": ["scores"],
    "insert_or_assign": ["rows", "scores"],
    "insert_and_evict": ["rows", "scores"],
    "accum_or_assign": ["rows", "belief", "scores"],
    "assign": ["rows", "scores"],
    "assign_rows": ["rows"],
    "assign_scores": ["scores"],
    "erase": [],
    "expire": None,
}


@pytest.mark.parametrize("operation", GROUP_OPERATIONS)
def test_operations_of_a_group(operation):
    specs = [
        TableSpec("a", 500, 3, expire_after=100),
        TableSpec("b", 700, 8, eviction="lfu"),
        TableSpec("c", 64, 1, eviction="customized"),
    ]
    group = TableGroup(specs, [0, 1, 2], device="cuda")
    offsets = torch.tensor([0, 300, 500, 600], device="cuda")
    cases = [
        {
            "ids": distinct_ids(600, "cuda"),
            "rows": torch.randn(600, 8, device="cuda"),
            "belief": torch.arange(600, device="cuda") % 2 == 0,
            "scores": torch.ones(600, dtype=torch.int64, device="cuda"),
        }
        for _ in range(4)
    ]

    def call(case):
        names = GROUP_OPERATIONS[operation]
        if names is None:
            getattr(group, operation)()
            return
        extra = {"trim": False} if operation == "insert_and_evict" else {}
        arguments = [case[name] for name in names]
        getattr(group, operation)(case["ids"], offsets, 1, *arguments, **extra)

    call(cases[0])
    group.find_or_insert_slots(cases[0]["ids"], offsets, 1, cases[0]["scores"])
    torch.cuda.synchronize()
    with no_waits():
        for case in cases[1:]:
            call(case)
            group.find_or_insert_slots(case["ids"], offsets, 1, case["scores"])


def test_training_and_evaluation():
    specs = [TableSpec(name, 500, 8, initializer=Uniform(-1, 1)) for name in "ab"]
    group = TableGroup(specs, [0, 1, 0], RowWiseAdagrad(), device="cuda")
    batches = [Bags.random(3, 50, random_ids(300)).to("cuda") for _ in range(6)]
    anchor = torch.empty(0, device="cuda")
    weights = [torch.rand(len(b.ids), device="cuda", requires_grad=True) for b in batches]
    grad = torch.randn(50, 24, device="cuda")
    lookup(group, batches[0]).backward(grad)
    none = rate(0.0, group)
    torch.cuda.synchronize()
    with no_waits():
        for bags, weight in zip(batches, weights, strict=True):
            lookup(group, bags, weight).backward(grad)
            with torch.no_grad():
                slots = find(group, bags)
                group.pooled_lookup(
                    anchor, bags.ids, bags.offsets, None, slots, 50, False, None, none
                )
