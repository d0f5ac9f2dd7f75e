"""The chosen plan is the best of all plans of small models."""

from __future__ import annotations

import pytest

from tests.support.exhaustive_plans import (
    all_options,
    best_plan,
    case,
    draw_rank_bytes,
    equal_tables,
    make_planner,
    planned,
    same,
)

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("seed", range(12))
def test_least_loss(seed):
    model, constraints, counts, costs, draw = case(seed)
    by_table = all_options(model, constraints, counts, costs)
    for room in draw_rank_bytes(by_table, draw):
        found = planned(make_planner(constraints, costs, room), model)
        assert same(found, best_plan(by_table, room)), room


@pytest.mark.parametrize("seed", range(28, 40))
def test_of_equal_losses_the_fastest(seed):
    model, constraints, counts, costs, draw = equal_tables(seed)
    by_table = all_options(model, constraints, counts, costs)
    for room in draw_rank_bytes(by_table, draw):
        best = best_plan(by_table, room)
        found = planned(make_planner(constraints, costs, room), model)
        if best is None or best[0] < 2:
            assert same(found, best), room
        else:  # levels that change places
            assert found[:2] == (best[0], pytest.approx(best[1]))


@pytest.mark.parametrize("seed", range(12, 20))
def test_the_fastest_within_a_bound_on_loss(seed):
    model, constraints, counts, costs, draw = case(seed)
    by_table = all_options(model, constraints, counts, costs)
    for room in draw_rank_bytes(by_table, draw):
        bound = draw.choice([0.0, 0.01, 0.05, 1.0])
        planner = make_planner(constraints, costs, room, max_quality_loss=bound)
        best = best_plan(by_table, room, max_loss=bound, fastest=True)
        assert same(found := planned(planner, model), best), (room, bound, found, best)


@pytest.mark.parametrize("seed", range(20, 28))
def test_the_least_loss_within_a_bound_on_time(seed):
    model, constraints, counts, costs, draw = case(seed)
    by_table = all_options(model, constraints, counts, costs)
    for room in draw_rank_bytes(by_table, draw):
        usual = best_plan(by_table, room)
        if usual is None:
            continue
        bound = usual[2] * draw.choice([0.5, 0.8, 1.0, 1.5])
        planner = make_planner(constraints, costs, room, max_step_time=bound)
        best = best_plan(by_table, room, max_time=bound)
        found = planned(planner, model)
        if best is not None and best[0] == 0:
            # Among plans without loss the fastest is taken, as elsewhere.
            assert found[:2] == (0, 0)
        assert same(found, best), (room, bound, found, best)
