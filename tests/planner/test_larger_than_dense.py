"""The planner never chooses a Tensor-Train table that is larger than its dense rows, and warns of
it by name."""

from __future__ import annotations

import warnings

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology

from tests.support.calibrations import calibration
from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)

ROWS, DIM = 5000, 16
LARGE, SMALL = TTOptions(ranks=64), TTOptions(ranks=8)


def _planner(kernels, options, max_loss=None):
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"),
        batch_size=8,
        constraints={"page": ParameterConstraints(compute_kernels=kernels, options=options)},
        # By time alone, it would choose Tensor-Train tables.
        calibration=calibration(fused=3e-3, hkv=2e-3, tt=1e-3),
        max_quality_loss=max_loss,
    )


def _plan(planner):
    table = EmbeddingBagConfig(
        name="page", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
    )
    return planner.plan(make_model([table]), get_default_sharders()).plan["ebc"]


def test_a_table_with_no_other_kernel_is_warned_of_once():
    shape = LARGE.shape(ROWS, DIM)
    assert shape.num_elements > ROWS * DIM
    planner = _planner(["tt"], LARGE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _plan(planner)["page"].backend == "tt"
        _plan(planner)
    (sentence,) = [str(each.message) for each in caught if "page" in str(each.message)]
    assert f"its cores take {4 * shape.num_elements:,} bytes" in sentence
    assert f"5,000 dense rows of 16 would take {4 * ROWS * DIM:,}" in sentence
    assert f"lower the ranks, which are {list(shape.ranks)}" in sentence


def test_cached_rows_count():
    shape = SMALL.shape(ROWS, DIM)
    assert shape.num_elements < ROWS * DIM
    with pytest.warns(UserWarning, match=r"and its cached rows 320,000, .* make the cache smaller"):
        _plan(_planner(["tt"], TTOptions(ranks=8, cache_size=ROWS)))


@pytest.mark.parametrize(
    ("kernels", "chosen"), [(["fused", "tt"], "fused"), (["hkv", "tt"], "hkv")]
)
def test_a_choice_passes_it_over(kernels, chosen):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plan = _plan(_planner(kernels, LARGE))
    report = plan.reports["page"]
    assert report.kernel == chosen
    assert "dense rows of 16 would take" in report.rejected["tt"]


def test_a_choice_takes_the_smaller_of_two():
    plan = _plan(_planner(["fused", "tt"], [LARGE, SMALL], max_loss=1.0))
    assert plan["page"].options == SMALL


def test_of_choices_that_are_all_larger_one_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match="'page' is planned on backend 'tt': its cores take"):
        plan = _plan(_planner(["tt"], [LARGE, TTOptions(ranks=63)]))
    assert plan["page"].backend == "tt"


def test_smaller_tables_are_chosen_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plan = _plan(_planner(["fused", "tt"], SMALL, max_loss=1.0))
        assert plan["page"].backend == "tt"
        assert _plan(_planner(["hkv"], HKVOptions()))["page"].backend == "hkv"
