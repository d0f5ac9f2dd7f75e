"""Arguments of the planner trade quality for time, and time for quality."""

from __future__ import annotations

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from tests.support.calibrations import calibration
from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)

pytestmark = pytest.mark.compat

ROWS, DIM = 100_000, 16
_DENSE = ROWS * DIM * 4


def _plan(
    room=1 << 30, names=("t",), table_bound=None, options=None, kernels=("fused", "tt"), **bounds
):
    constraint = ParameterConstraints(
        compute_kernels=list(kernels),
        sharding_types=["table_wise"],
        options=options,
        max_quality_loss=table_bound,
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu", ddr_cap=room),
        batch_size=8,
        constraints=dict.fromkeys(names, constraint),
        calibration=calibration(fused=3e-3, tt=1e-3),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        **bounds,
    )
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
        for name in names
    ]
    return planner.plan(make_model(tables), get_default_sharders()).plan["ebc"]


def _kernels(plan):
    return [report.kernel for report in plan.reports.values()]


def test_by_default_nothing_is_given_up_for_time():
    assert _kernels(_plan()) == ["fused"]


def test_a_bound_on_the_loss_buys_time():
    plan = _plan(max_quality_loss=0.5)
    assert _kernels(plan) == ["tt"]
    loss = plan.reports["t"].loss
    assert 0 < loss.value <= 0.5
    assert loss.why.startswith("max_quality_loss allows it for time (fused: the slowest rank")
    # Equally fast ranks: those that lose least.
    assert plan["t"].options.ranks > 32


def test_a_bound_that_is_too_low_for_both_tables_compresses_one():
    options = TTOptions(ranks=8)
    both = _plan(names=("a", "b"), options=options, max_quality_loss=1.0)
    assert _kernels(both) == ["tt", "tt"]
    each = both.reports["a"].loss.value
    one = _plan(names=("a", "b"), options=options, max_quality_loss=1.5 * each)
    assert sorted(_kernels(one)) == ["fused", "tt"]
    none = _plan(names=("a", "b"), options=options, max_quality_loss=0.9 * each)
    assert _kernels(none) == ["fused", "fused"]


def test_a_bound_of_a_table():
    assert _kernels(_plan(max_quality_loss=1.0, table_bound=0.0)) == ["fused"]
    plan = _plan(names=("a", "b"), room=_DENSE, table_bound=0.03)
    assert all(report.loss.value <= 0.03 for report in plan.reports.values() if report.loss)


def test_where_more_would_be_lost_than_allowed_the_plan_is_refused():
    for bound in ({"max_quality_loss": 0.0}, {"table_bound": 0.0}):
        with pytest.raises(PlannerError) as refusal:
            _plan(room=_DENSE // 4, **bound)
        assert refusal.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS
        text = str(refusal.value)
        assert "The least possible loss is an estimated 0.0" in text
        assert "'ebc.embedding_bags.t' 0.0" in text
        assert " on tt (ranks " in text


def test_a_table_without_a_choice_counts():
    """Also if its constraint names nothing that loses less."""
    settled = {"names": ("a", "b"), "options": TTOptions(ranks=8), "kernels": ("tt",)}
    each = _plan(**settled).reports["a"].loss.value
    assert _kernels(_plan(**settled, max_quality_loss=2.1 * each)) == ["tt", "tt"]
    for bound in (1.9 * each, 0.0):
        with pytest.raises(PlannerError, match=r"No plan fits within max_quality_loss") as refusal:
            _plan(**settled, max_quality_loss=bound)
        assert refusal.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS


def test_a_bound_on_the_time_costs_quality_only_where_it_must():
    dense, compressed = (
        _plan(max_quality_loss=bound).reports["t"].times[0].total for bound in (0.0, 0.5)
    )
    assert compressed < dense
    assert _kernels(_plan(max_step_time=1.01 * dense)) == ["fused"]
    plan = _plan(max_step_time=(dense + compressed) / 2)
    assert _kernels(plan) == ["tt"]
    with pytest.raises(PlannerError, match=r"max_step_time is .* ms, but the plan"):
        _plan(max_step_time=0.9 * compressed)
    with pytest.raises(PlannerError, match=r"max_step_time is .* ms, but the plan"):
        _plan(max_step_time=(dense + compressed) / 2, max_quality_loss=0.0)


def test_a_bound_on_the_time_where_something_has_to_be_lost():
    tight = _plan(room=_DENSE // 4)
    assert _kernels(tight) == ["tt"]
    elapsed = tight.reports["t"].times[0].total
    assert _kernels(_plan(room=_DENSE // 4, max_step_time=1.01 * elapsed)) == ["tt"]
    with pytest.raises(PlannerError, match=r"max_step_time is .* ms, but the plan"):
        _plan(room=_DENSE // 4, max_step_time=0.5 * elapsed)
