"""The time of TorchRec's code in each stage of a step is measured on a small collection."""

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
from torchrec_hkv.planner.stage_timing import input_dist_costs, shapes_of, stage_timers
from torchrec_hkv.planner.stages import INPUT_DISTS, STAGES, IdExchange, input_dist_of, step_parts

pytestmark = pytest.mark.compat


def _parts(times, name, features=3, bags=300, ids=1000):
    return step_parts(times, features, [IdExchange(name, features, bags, ids)])


def test_parts_of_a_step(device_type):
    device = torch.device(device_type, 0 if device_type == "cuda" else None)
    with stage_timers(device) as timers:
        assert list(timers) == [1]
        for _ in range(2):
            timers[1].measure(1)
        times, exchange = timers[1].times()
    assert not dist.is_initialized()
    assert exchange is None  # no other rank to exchange with
    assert set(times) == {*STAGES, *INPUT_DISTS.values()}
    for stage, costs in times.items():
        parts = {"fixed", "feature", "bag", "id"} if "input_dist" in stage else {"fixed", "feature"}
        assert set(costs) == parts
    for name in INPUT_DISTS.values():
        measured = _parts(times, name)
        assert tuple(measured) == STAGES
        assert all(0 < part < 1000 for part in measured.values())


def _between_ranks(rank, world_size, device):
    with stage_timers(device) as timers:
        for timer in timers.values():
            # On a GPU the exchange of these rows takes little longer than an empty one.
            timer.measure(4 if device.type == "cuda" else 1)
        return {ranks: timer.times() for ranks, timer in timers.items()}


def test_ranks_time_their_exchange(run_ranks):
    first, second = run_ranks(2, _between_ranks)
    assert (list(first), list(second)) == ([1, 2], [2])  # also on the first rank alone
    assert first[1][1] is None
    for times, exchange in (first[2], second[2]):
        assert 1e3 < exchange < 1e10
        for name in INPUT_DISTS.values():
            measured = _parts(times, name, 1, 8, 8)
            assert min(measured.values()) > 0
            assert {**measured, "input_dist": 0.0} == {
                **_parts(times, STAGES[0], 1),
                "input_dist": 0.0,
            }


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize(
    "true",
    [
        {"fixed": 0.5, "feature": 2e-3, "bag": 1e-6, "id": 4e-7},
        {"fixed": 1.0, "feature": 0.0, "bag": 0.0, "id": 5e-7},
        {"fixed": 1.0, "feature": 1e-2, "bag": 0.0, "id": 0.0},
    ],
)
def test_exchanges_of_other_shapes_than_those_that_were_timed(ranks, by_table, true):
    """Exchanges of unmeasured shapes are predicted from measurements that are up to 5 % off."""
    shapes = list(shapes_of(65536, ranks, by_table).values())
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        times = [
            (true["fixed"] + sum(true[name] * count for name, count in shape.work.items()))
            * (1 + 0.1 * (float(torch.rand((), generator=generator)) - 0.5))
            for shape in shapes
        ]
        found = input_dist_costs(shapes, times)
        assert min(found.values()) >= 0
        for features, bags, length in ((4, 8192, 1), (4, 8192, 8), (1, 512, 100), (6, 2048, 20)):
            counts = {"features": features, "bags": features * bags}
            exchange = IdExchange("input_dist", **counts, ids=features * bags * length)
            elapsed, wanted = (
                step_parts({"input_dist": costs}, features, [exchange])["input_dist"]
                for costs in (found, true)
            )
            assert elapsed == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(
    ("sharding_type", "has_backends", "name"),
    [
        ("row_wise", False, "input_dist"),
        ("table_row_wise", True, "input_dist_of_backends"),
        ("column_wise", False, "input_dist_by_table"),
        ("table_wise", True, "input_dist_of_backends_by_table"),
        ("data_parallel", True, None),
    ],
)
def test_which_exchange(sharding_type, has_backends, name):
    assert input_dist_of(sharding_type, has_backends) == name


def _planned(device_type, measured, sharding_type="row_wise", ranks=2, kernel="hkv"):
    constraint = ParameterConstraints(compute_kernels=[kernel], sharding_types=[sharding_type])
    table = EmbeddingBagConfig(name="t", num_embeddings=640, embedding_dim=8, feature_names=["f"])
    planner = EmbeddingShardingPlanner(
        topology=topology(ranks, torch.device(device_type)),
        constraints={"t": constraint},
        calibration=measured,
    )
    plan = planner.plan(make_model([table]), get_default_sharders())
    return planner._topology.intra_host_bw, plan.plan["ebc"].reports["t"].times[0]


def test_exchanges_take_what_was_measured():
    alone = calibration(hkv=1e-3)
    bandwidth, stock = _planned("cpu", alone)
    measured = dataclasses.replace(alone, exchange=bandwidth / 5)
    _, slow = _planned("cpu", measured)
    for part in ("fwd_comms", "input_dist_comms"):
        assert getattr(slow, part) == pytest.approx(5 * getattr(stock, part))
        assert getattr(stock, part) > 0
    # For row-wise tables, TorchRec counts a copy in the backward that does not happen.
    assert stock.bwd_comms > stock.fwd_comms
    assert slow.bwd_comms == slow.fwd_comms
    assert slow.fwd_compute == stock.fwd_compute


def test_replicated_tables_exchange_gradients():
    alone = calibration(tt=1e-3)
    bandwidth, stock = _planned("cpu", alone, "data_parallel", kernel="tt")
    measured = dataclasses.replace(alone, exchange=bandwidth / 5)
    _, slow = _planned("cpu", measured, "data_parallel", kernel="tt")
    assert stock.fwd_comms == slow.fwd_comms == 0
    assert slow.bwd_comms == pytest.approx(5 * stock.bwd_comms)
    assert stock.bwd_comms > 0


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_one_rank_exchanges_nothing(sharding_type):
    _, perf = _planned("cpu", calibration(hkv=1e-3), sharding_type, ranks=1)
    assert (perf.input_dist_comms, perf.fwd_comms, perf.bwd_comms) == (0, 0, 0)
    assert perf.fwd_compute > 0


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
    # Tables of backends have a separate exchange; other tables join it.
    stages["input_dist_of_backends_by_table"] = {"fixed": 500.0}
    assert ReportedModulePlan({}, reports, stages).step_times(0)["input_dist"] == 500.25
    stock = {"c": reports["c"]}
    assert ReportedModulePlan({}, stock, stages).step_times(1)["input_dist"] < 500
    # Each sharding type has its own exchange.
    stages["input_dist_of_backends"] = {"fixed": 70.0}
    mixed = {**reports, "b": dataclasses.replace(reports["b"], sharding_type="row_wise")}
    assert ReportedModulePlan({}, mixed, stages).step_times(0)["input_dist"] == 570.25
    whole = {"c": dataclasses.replace(reports["c"], sharding_type="data_parallel")}
    assert ReportedModulePlan({}, whole, stages).step_times(1)["input_dist"] == 0.125
