"""What TorchRec's code takes in each part of a step is measured on a small collection."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner.types import Perf

from tests.support.calibrations import calibration
from tests.support.models import make_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.backends.protocol import StorageBytes
from torchrec_hkv.backends.workload import StepTime
from torchrec_hkv.planner.report import ReportedModulePlan, TableReport
from torchrec_hkv.planner.stages import BACKEND_INPUT_DIST, STAGES, stage_times, step_parts

pytestmark = pytest.mark.compat


def test_parts_of_a_step(device_type):
    device = torch.device(device_type, 0 if device_type == "cuda" else None)
    times, exchange = stage_times(device)
    assert exchange is None  # there is nobody to exchange with
    assert tuple(times) == STAGES
    for stage in STAGES:
        parts = {"fixed", "feature", "bag", "id"} if stage == "input_dist" else {"fixed", "feature"}
        assert set(times[stage]) == parts
    took = step_parts(times, features=3, bags=300, ids=1000)
    assert all(0 < part < 1000 for part in took.values())
    assert not dist.is_initialized()


def _between_ranks(rank, world_size, device):
    times, exchange = stage_times(device)
    stock, ours = (step_parts(times, 1, 8, 8, has_backends) for has_backends in (False, True))
    assert set(times[BACKEND_INPUT_DIST]) == set(times["input_dist"])
    return min(stock.values()), stock, ours, exchange


def test_ranks_time_their_exchange(run_ranks):
    for least, stock, ours, exchange in run_ranks(2, _between_ranks):
        assert least > 0
        assert 1e3 < exchange < 1e10
        # Backends have an exchange of their own, and all else alike.
        assert 0 < ours["input_dist"] != stock["input_dist"]
        assert {**ours, "input_dist": 0.0} == {**stock, "input_dist": 0.0}


def _exchanges(device_type, measured):
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"])
    table = EmbeddingBagConfig(name="t", num_embeddings=640, embedding_dim=8, feature_names=["f"])
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(device_type)),
        constraints={"t": constraint},
        calibration=measured,
    )
    plan = planner.plan(make_model([table]), get_default_sharders())
    return planner._topology.intra_host_bw, plan.plan["ebc"].reports["t"].times[0]


def test_exchanges_take_what_was_measured():
    alone = calibration(hkv=1e-3)
    bandwidth, stock = _exchanges("cpu", alone)
    measured = dataclasses.replace(alone, exchange=bandwidth / 5)
    _, slow = _exchanges("cpu", measured)
    for part in ("fwd_comms", "input_dist_comms"):
        assert getattr(slow, part) == pytest.approx(5 * getattr(stock, part))
        assert getattr(stock, part) > 0
    # Row-wise TorchRec counts a copy in the backward, which is no exchange.
    copy = stock.bwd_comms - stock.fwd_comms
    assert copy > 0
    assert slow.bwd_comms == pytest.approx(5 * stock.fwd_comms + copy)
    assert slow.fwd_compute == stock.fwd_compute


def _table(kernel, ranks, forward, group):
    perf = Perf(
        fwd_compute=forward, fwd_comms=0.5, bwd_compute=2.0, bwd_comms=0.25, input_dist_comms=0.125
    )
    return TableReport(
        kernel=kernel,
        sharding_type="table_wise",
        ranks=ranks,
        rows=(8,) * len(ranks),
        dim=4,
        bytes=(StorageBytes(0, 8),) * len(ranks),
        options="",
        times=(perf,) * len(ranks),
        group_time=group,
        features=2,
        bags=4.0,
        ids=10.0,
    )


def test_a_step_is_the_sum_of_its_tables_and_groups():
    group = StepTime(10.0, 20.0)
    reports = {
        "a": _table("hkv", (0,), 1.0, group),
        "b": _table("hkv", (0, 1), 2.0, group),
        "c": _table("fused", (1,), 3.0, StepTime(100.0, 200.0)),
    }
    stages = {
        # Six features, twelve bags and thirty ids.
        "input_dist": {
            "fixed": 0.0625,
            "feature": 0.03125,
            "bag": 0.0052083333333333,
            "id": 0.00625,
        },
        "forward": {"fixed": 700.0, "feature": 50.0},
        "output_dist": {"fixed": 2.0},
        "backward": {"fixed": 3000.0, "feature": 0.0},
    }
    plan = ReportedModulePlan({}, reports, stages)
    assert plan.step_times(0) == {
        "input_dist": pytest.approx(0.75),
        "forward": 1013.0,
        "output_dist": 3.0,
        "backward": 3024.5,
    }
    assert plan.step_times(1)["forward"] == 1115.0
    assert plan.step_times(1)["backward"] == 3224.5
    assert "A step of rank 1, in ms: input_dist 0.75, forward 1.12e+03" in str(plan)
    assert "A step" not in str(ReportedModulePlan({}, reports))
    # Over several ranks tables of backends have an exchange of their own, and bring others along.
    stages[BACKEND_INPUT_DIST] = {"fixed": 500.0}
    assert ReportedModulePlan({}, reports, stages).step_times(0)["input_dist"] == 500.25
    stock = {"c": reports["c"]}
    assert ReportedModulePlan({}, stock, stages).step_times(1)["input_dist"] < 500
