"""Training lookups take scores for tables under "customized"; other tables count as usual."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import rate
from torchrec_hkv.hash_table import SGD, Constant, TableGroup, TableSpec, scores_of_weights

POLICIES = ("customized", "lfu", "lru", "customized")
CAPACITY = 64


def make(device_type: str, policies=POLICIES, **options) -> TableGroup:
    """A table of one bucket for each policy, each with one feature."""
    tables = [
        TableSpec(str(i), CAPACITY, 4, eviction=policy, initializer=Constant(0.5), **options)
        for i, policy in enumerate(policies)
    ]
    return TableGroup(tables, range(len(tables)), SGD(), device=device_type)


def look_up(group: TableGroup, ids: list[int], given: list[int] | None, **changed) -> torch.Tensor:
    """A training lookup of the same ids, one a bag, in every table."""
    tables, n = len(group.tables), len(ids)
    device = group.device
    arguments = {
        "anchor": torch.empty(0, device=device, requires_grad=True),
        "ids": torch.tensor(ids * tables, dtype=torch.int64, device=device),
        "offsets": torch.arange(tables * n + 1, device=device),
        "weights": None,
        "batch_size": n,
        "mean": False,
        "learning_rate": rate(0.5, group),
    }
    if given is not None:
        arguments["scores"] = torch.tensor(given * tables, device=device)
    return group.train_lookup(**(arguments | changed))


def held(group: TableGroup, table: int) -> dict[int, int]:
    """Scores by id; last steps under LRU."""
    state = group.export_table(table)
    there = state.occupied
    scores = state.scores if group.tables[table].eviction != "lru" else state.last_steps
    return dict(zip(state.ids[there].tolist(), scores[there].tolist(), strict=True))


def test_scores_are_those_of_customized_tables(device_type):
    group = make(device_type)
    look_up(group, [7, -1, 7, 9], [5, -(2**63), 5, 2**63 - 1])
    look_up(group, [9], [-3])
    for table in (0, 3):
        assert held(group, table) == {7: 5, -1: -(2**63), 9: -3}
    assert held(group, 1) == {7: 2, -1: 1, 9: 2}
    assert held(group, 2) == {7: 1, -1: 1, 9: 2}


def test_the_lowest_leaves_even_for_a_lower_one(device_type):
    group = make(device_type, ("customized",))
    ids = list(range(CAPACITY))
    look_up(group, ids, [10 * (i - 30) for i in ids]).sum().backward()
    rows = look_up(group, [1000], [-(2**62)])
    assert rows.tolist() == [[0.5] * 4]
    rows.sum().backward()
    assert 0 not in held(group, 0)
    assert held(group, 0)[1000] == -(2**62)
    # It was trained, and is the next to leave.
    assert look_up(group, [1000], [-(2**62)]).tolist() == [[0.0] * 4]
    look_up(group, [1001], [5])
    assert 1000 not in held(group, 0)
    assert group.counters()[0]["refused"] == 0


def test_the_last_of_several_scores_stays(device_type):
    group = make(device_type, ("customized",), deterministic=True)
    look_up(group, [3, 4, 3, 3], [9, 1, 2, 6])
    assert held(group, 0) == {3: 6, 4: 1}
    look_up(group, [4, 3, 4], [9, 8, 7])
    assert held(group, 0) == {3: 8, 4: 7}


def test_held_gradients(device_type):
    group = make(device_type, ("customized",))
    with group.accumulate():
        look_up(group, [3, 4], [9, 1]).sum().backward()
    look_up(group, [3, 5], [2, 6]).sum().backward()
    assert held(group, 0) == {3: 2, 4: 1, 5: 6}
    assert look_up(group, [3, 4], [2, 1])[:, 0].tolist() == [-0.5, 0.0]


def test_growing_table(device_type):
    group = make(device_type, ("customized",), initial_capacity=1)
    for first in range(0, 60, 20):
        ids = list(range(first, first + 20))
        look_up(group, ids, [-i for i in ids]).sum().backward()
    assert held(group, 0) == {i: -i for i in range(60)}


@pytest.mark.parametrize(
    ("policies", "changed", "error", "match"),
    [
        (POLICIES, {"scores": None}, ValueError, "needs scores, which this lookup has not"),
        (("lfu", "lru"), {}, ValueError, "no table has eviction 'customized'"),
        (POLICIES, {"scores": torch.ones(8)}, TypeError, "scores must be of dtype"),
        (POLICIES, {"scores": torch.ones(7, dtype=torch.int64)}, ValueError, "scores must have"),
    ],
)
def test_bad_scores_change_nothing(device_type, policies, changed, error, match):
    group = make(device_type, policies)
    changed = {k: v if v is None else v.to(device_type) for k, v in changed.items()}
    with pytest.raises(error, match=match):
        look_up(group, [1, 2], None if changed else [3, 4], **changed)
    assert group.sizes() == [0] * len(policies)
    assert group.clock == 0


def test_ops(device_type):
    group = make(device_type)
    counters, n = group.counter_tensor, 4 * 5
    ids = torch.arange(n, device=device_type) % 3
    offsets, scores = torch.arange(n + 1, device=device_type), ids * 7
    ops = torch.ops.torchrec_hkv
    args = (counters, group.handle, ids, offsets, 5, None, None, scores)
    torch.library.opcheck(ops.find_or_insert, args)
    anchor = torch.empty(0, device=device_type, requires_grad=True)
    args = (counters, anchor, group.handle, ids, offsets, None, 5, True, rate(0.0, group))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (*args, None, None, scores)
    torch.library.opcheck(ops.train_lookup, args, test_utils=checks)


def test_scores_of_weights_are_in_order(device_type):
    inf, nan = float("inf"), float("nan")
    weights = [-inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, inf]
    scores = scores_of_weights(torch.tensor([*weights, nan], device=device_type))
    assert scores.dtype == torch.int64
    *ordered, of_nan = scores.tolist()
    assert ordered == sorted(set(ordered))
    assert of_nan == ordered[0]
    assert min(ordered) >= -(2**31)
    assert max(ordered) < 2**31
    halves = torch.tensor([0.25, -2.0], dtype=torch.bfloat16, device=device_type)
    assert torch.equal(scores_of_weights(halves), scores_of_weights(halves.double()))
