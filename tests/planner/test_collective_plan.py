"""``collective_plan``: one rank plans; every rank gets the plan, or the error."""

from __future__ import annotations

import time

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner.types import PlannerError

from tests.support.models import make_model, plan_model
from tests.support.toy_backend import ToyOptions
from torchrec_hkv import ParameterConstraints

pytestmark = pytest.mark.compat


def _tables(rows=64):
    return [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])]


def _plan(rank, world_size, device):
    constraint = ParameterConstraints(compute_kernels=["toy"], options=ToyOptions(seed=2))
    return str(plan_model(make_model(_tables()), {"t": constraint}, world_size, device))


def test_every_rank_gets_the_plan(run_ranks):
    plans = run_ranks(2, _plan)
    assert plans[0] == plans[1]
    assert "seed=2" in plans[0]


def _refused(rank, world_size, device):
    constraint = ParameterConstraints(compute_kernels=["toy"], options=ToyOptions(max_capacity=9))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="at most 9 are allowed") as refusal:
        plan_model(make_model(_tables()), {"t": constraint}, world_size, device)
    return str(refusal.value), time.monotonic() - begin


def test_every_rank_gets_the_error(run_ranks):
    results = run_ranks(2, _refused, timeout=60)
    assert results[0][0] == results[1][0]
    assert max(seconds for _, seconds in results) < 10


def _too_large(rank, world_size, device):
    options = ToyOptions(max_capacity=1 << 50)
    constraint = ParameterConstraints(compute_kernels=["toy"], options=options)
    with pytest.raises(PlannerError, match="insufficient storage") as refusal:
        plan_model(make_model(_tables(1 << 40)), {"t": constraint}, world_size, device)
    return refusal.value.error_type.value


def test_every_rank_gets_the_planners_own_error(run_ranks):
    assert run_ranks(2, _too_large, timeout=60) == ["insufficient_storage"] * 2
