"""Loss curves: values between and beyond points, a benchmark's file, bad input."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from torchrec_hkv import EmbeddingShardingPlanner, HKVOptions, ParameterConstraints
from torchrec_hkv.planner import QualityCurve
from torchrec_hkv.planner.constraints import choices
from torchrec_hkv.planner.quality_curve import MEASURED

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tensor_train_quality.csv"


def test_points_are_met_and_joined():
    curve = QualityCurve(((0.01, 0.2), (0.1, 0.03)))
    assert curve.loss(1.0) == curve.loss(1.5) == 0
    assert curve.loss(0.1) == pytest.approx(0.03)
    assert curve.loss(0.01) == pytest.approx(0.2)
    assert curve.loss(math.sqrt(0.1)) == pytest.approx(0.015)
    assert curve.loss(math.sqrt(0.001)) == pytest.approx(0.115)
    assert curve.loss(0.001) == pytest.approx(0.37)


def test_less_kept_never_loses_less():
    for curve in MEASURED.values():
        losses = [curve.loss(share / 1000) for share in range(1000, 0, -1)]
        assert losses == sorted(losses)


def test_the_built_in_curve_of_compression_is_what_was_measured():
    curve = QualityCurve.of_csv(_RESULTS)
    for share in (0.5, 0.2, 0.05, 0.01, 0.001):
        assert MEASURED["compression"].loss(share) == pytest.approx(curve.loss(share), rel=0.02)
    by_frequency = QualityCurve.of_csv(_RESULTS, "order by frequency")
    assert by_frequency.loss(0.05) < curve.loss(0.05)


def test_files_that_are_no_curves(tmp_path):
    with pytest.raises(ValueError, match="'dense' and 'other' are needed"):
        QualityCurve.of_csv(_RESULTS, "other")
    path = tmp_path / "curve.csv"
    path.write_text("variant,auc\ndense,0.7\n")
    with pytest.raises(ValueError, match="must have the columns variant, ratio, auc"):
        QualityCurve.of_csv(path)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((), "points are"),
        ("ab", "points are 'ab'"),
        (((1.0, 0.1),), "a point is"),
        (((0.0, 0.1),), "a point is"),
        (((0.5, -0.1),), "a point is"),
        (((0.5, math.nan),), "a point is"),
        (((0.5,),), "a point is"),
        (((0.5, 0.1), (0.5, 0.2)), "shares must differ"),
        (((0.5, 0.1), (0.2, 0.05)), "must not decrease"),
    ],
)
def test_impossible_points(points, said):
    with pytest.raises(ValueError, match=said):
        QualityCurve(points)


def _constraint(**fields):
    return {"t": ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions(), **fields)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quality_curves": {"colour": QualityCurve(((0.5, 0.1),))}}, "quality_curves is"),
        ({"quality_curves": {"rows": 0.5}}, "quality_curves is"),
        ({"quality_curves": QualityCurve(((0.5, 0.1),))}, "quality_curves is"),
        ({"max_quality_loss": -1}, "max_quality_loss is -1"),
        ({"max_quality_loss": True}, "max_quality_loss is True"),
        ({"max_quality_loss": math.inf}, "max_quality_loss is inf"),
    ],
)
def test_constraints_that_make_no_sense(fields, said):
    with pytest.raises(ValueError, match=f"Table 't': {said}"):
        choices(_constraint(**fields))


def test_curves_of_a_table_that_can_lose_nothing():
    curves = {"rows": QualityCurve(((0.5, 0.1),))}
    constraint = ParameterConstraints(compute_kernels=["fused"], quality_curves=curves)
    with pytest.raises(ValueError, match="no backend that could lose quality"):
        choices({"t": constraint})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_quality_loss", -0.1),
        ("max_quality_loss", "0.1"),
        ("max_quality_loss", math.nan),
        ("max_step_time", 0),
        ("max_step_time", math.inf),
        ("max_step_time", False),
    ],
)
def test_bounds_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be a finite number"):
        EmbeddingShardingPlanner(**{name: value})


def test_constraints_with_curves_hash_by_them():
    one, other = (_constraint(quality_curves={"rows": QualityCurve(((0.5, x),))}) for x in (1, 2))
    assert hash(one["t"]) != hash(other["t"])
    assert hash(one["t"]) == hash(_constraint(quality_curves=dict(one["t"].quality_curves))["t"])
