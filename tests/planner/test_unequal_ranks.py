"""With ranks of unequal memory and tables larger than a rank, plans are the best of all plans of
small models."""

from __future__ import annotations

import math

import pytest

from tests.support.exhaustive_plans import (
    all_options,
    best_plan,
    case,
    draw_rank_bytes,
    make_planner,
    planned,
    same,
)

pytestmark = pytest.mark.compat


def unequal(room, num_ranks, draw):
    """Splits the same total memory at random. Some ranks may have almost none."""
    parts = [draw.random() ** 2 + 1e-3 for _ in range(num_ranks)]
    return [math.ceil(room * num_ranks * part / sum(parts)) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 46))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_least_loss_on_unequal_ranks(seed, num_ranks):
    model, constraints, counts, costs, draw = case(seed)
    for room in draw_rank_bytes(all_options(model, constraints, counts, costs), draw):
        rooms = unequal(room, num_ranks, draw)
        by_table = all_options(model, constraints, counts, costs, rooms)
        found = planned(make_planner(constraints, costs, rooms), model)
        assert same(found, best := best_plan(by_table, rooms)), (rooms, found, best)


@pytest.mark.parametrize("seed", range(60, 66))
@pytest.mark.parametrize(
    ("sharding_types", "more_kernels"),
    [
        (["table_wise"], []),
        (["data_parallel"], ["dense"]),
        (["data_parallel", "table_wise"], ["dense"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_tables_that_are_not_divided(seed, sharding_types, more_kernels):
    """Tables lie whole on a rank, so the largest may fit nowhere."""
    model, constraints, counts, costs, draw = case(seed, sharding_types, more_kernels)
    for room in draw_rank_bytes(all_options(model, constraints, counts, costs), draw):
        rooms = unequal(room, 2, draw)
        by_table = all_options(model, constraints, counts, costs, rooms)
        found = planned(make_planner(constraints, costs, rooms), model)
        assert same(found, best := best_plan(by_table, rooms)), (rooms, found, best)


@pytest.mark.parametrize("seed", range(80, 84))
def test_the_fastest_within_a_bound_on_loss_on_unequal_ranks(seed):
    model, constraints, counts, costs, draw = case(seed, ["data_parallel", "table_wise"], ["dense"])
    for room in draw_rank_bytes(all_options(model, constraints, counts, costs), draw):
        rooms, bound = unequal(room, 2, draw), draw.choice([0.0, 0.01, 0.05, 1.0])
        by_table = all_options(model, constraints, counts, costs, rooms)
        planner = make_planner(constraints, costs, rooms, max_quality_loss=bound)
        best = best_plan(by_table, rooms, max_loss=bound, fastest=True)
        assert same(found := planned(planner, model), best), (rooms, bound, found, best)
