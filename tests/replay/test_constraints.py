"""The planner accepts the constraints of a replay unchanged."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology

from tests.cli.test_plan_replay import SEEN, table
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.replay import ReplayedLog

LOG = ReplayedLog(64, 1.0, {n: table(n, 0.3, 0.8) for n in ("user", "item")})


def plan(constraints, hbm, rows=10_000):
    configs = [
        EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=rows, embedding_dim=64)
        for n in constraints
    ]
    topology = Topology(1, "cuda", hbm_cap=hbm, ddr_cap=1 << 20, local_world_size=1)
    planner = EmbeddingShardingPlanner(topology, batch_size=64, constraints=constraints)
    model = EmbeddingBagCollection(configs, device=torch.device("meta"))
    return planner.plan(model, get_default_sharders()).plan[""].reports


def test_the_planner_chooses_rows():
    constraints = LOG.constraints(sharding_types=["row_wise"])
    assert constraints["user"].options == HKVOptions(eviction="lfu")
    (whole,) = plan({"user": constraints["user"]}, 1 << 30)["user"].rows
    (fewer,) = plan({"user": constraints["user"]}, 2 << 20)["user"].rows
    assert whole == 10_000
    assert 1000 < fewer < 8000


def test_a_budget_chooses_rows():
    capacities = LOG.capacities(400_000)
    constraints = LOG.constraints(400_000, sharding_types=["row_wise"])
    reports = plan(constraints, 1 << 30)
    for name, capacity in capacities.items():
        assert reports[name].rows == (capacity.rows,)
        assert constraints[name].options.eviction == capacity.policy.eviction
    weighed = LOG.constraints(400_000, {"item": 10.0})
    assert weighed["item"].options.capacity > capacities["item"].rows


def test_refused_arguments():
    with pytest.raises(ValueError, match="importance weighs tables under a budget"):
        LOG.constraints(importance={"user": 2.0})
    with pytest.raises(ValueError, match="The budget is 1 bytes"):
        LOG.constraints(1)


def test_measured_shares():
    seen = IdFrequencies(SEEN.histogram, shares=((1000, 0.25), (4000, 0.75)))
    assert [seen.share_of(n) for n in (500, 1000, 2000, 4000, 10_000, 20_000)] == pytest.approx(
        [0.125, 0.25, 0.5, 0.75, 1.0, 1.0]
    )
    assert 0.75 < seen.share_of(6000) < 1.0
    measured = LOG.constraints()["user"].frequencies
    assert measured.share_of(4000) == pytest.approx(0.8 / 0.9)


@pytest.mark.parametrize(
    "shares", [((0, 0.5),), ((5, 1.5),), ((5, 0.5), (5, 0.6)), ((5, 0.5), (6, 0.4)), ((5,),)]
)
def test_impossible_shares(shares):
    with pytest.raises(ValueError, match="IdFrequencies: shares has"):
        IdFrequencies(((10, 1.0),), shares=shares)


def test_choosing_sizes_needs_a_backend():
    for constraint, match in (
        (ParameterConstraints(compute_kernels=["fused"], choose_sizes=True), "no backend whose"),
        (ParameterConstraints(compute_kernels=["hkv"], choose_sizes=1), "choose_sizes is 1, but"),
    ):
        with pytest.raises(ValueError, match=match):
            plan({"user": constraint}, 1 << 30)


def test_sizes_stay_where_nobody_lets_them_be_chosen():
    settled = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=["row_wise"],
        options=HKVOptions(eviction="lfu"),
        frequencies=SEEN,
    )
    with pytest.raises(Exception, match=r"(?i)plan"):
        plan({"user": settled}, 2 << 20)
