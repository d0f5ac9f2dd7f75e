"""If a table's constraint names several kernels, it gets the fastest one that fits without loss;
the plan says why."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from tests.support.calibrations import calibration
from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.backends.constants import FIXED, Constants, Fit
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.sharding import BackendParameterSharding

pytestmark = pytest.mark.compat

ROWS, DIM = 200_000, 16
#: Bytes with SGD: of stock rows; and an upper bound of a hash table with as many slots.
DENSE, HASHED = ROWS * DIM * 4, ROWS * DIM * 4 + ROWS * 32


def _planner(
    names, bytes_a_rank, measured=None, world_size=2, kernels=None, max_loss=None, **constraint
):
    constraint = ParameterConstraints(
        compute_kernels=kernels or ["fused", "hkv", "tt"],
        sharding_types=["table_wise", "row_wise"],
        **constraint,
    )
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=world_size,
            compute_device="cpu",
            ddr_cap=bytes_a_rank,
        ),
        batch_size=8,
        constraints=dict.fromkeys(names, constraint),
        calibration=measured or calibration(fused=1e-3, hkv=2e-3, tt=8e-3),
        max_quality_loss=max_loss,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )


def _plan(bytes_a_rank, measured=None, names=("t",), rows=ROWS, **constraint):
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{name}"]
        )
        for name in names
    ]
    planner = _planner(names, bytes_a_rank, measured, **constraint)
    return planner.plan(make_model(tables), get_default_sharders())


def _kernels(plan):
    return {name: report.kernel for name, report in plan.plan["ebc"].reports.items()}


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"fused": 1e-3, "hkv": 2e-3, "tt": 8e-3}, "fused"),
        ({"fused": 3e-3, "hkv": 2e-3, "tt": 8e-3}, "hkv"),
        ({"fused": 3e-3, "hkv": 2e-3, "tt": 1e-3}, "hkv"),
    ],
)
def test_with_room_for_all_the_fastest_that_loses_nothing(costs, chosen):
    plan = _plan(1 << 30, calibration(**costs))
    assert _kernels(plan) == {"t": chosen}
    sharding = plan.plan["ebc"]["t"]
    assert isinstance(sharding, BackendParameterSharding) == (chosen != "fused")
    if chosen != "fused":
        assert sharding.backend == chosen


@pytest.mark.parametrize(
    ("bytes_a_rank", "chosen"),
    [(2 * HASHED, "hkv"), (DENSE + (1 << 16), "fused"), (DENSE // 8, "tt")],
)
def test_the_fastest_that_fits(bytes_a_rank, chosen):
    # On one rank the hash table is the fastest, and the largest because of its index.
    measured = calibration(fused=3e-3, hkv=2e-3, tt=8e-3)
    assert _kernels(_plan(bytes_a_rank, measured, world_size=1)) == {"t": chosen}


def test_one_of_two_tables_where_there_is_room_for_one():
    plan = _plan(DENSE + DENSE // 8, names=("a", "b"), world_size=1)
    assert sorted(_kernels(plan).values()) == ["fused", "tt"]
    reports = plan.plan["ebc"].reports
    (compressed,) = [report for report in reports.values() if report.kernel == "tt"]
    assert "it does not fit" in compressed.rejected["fused"]
    (dense,) = [report for report in reports.values() if report.kernel == "fused"]
    assert dense.rejected["tt"] == "it would lose more quality"


def test_the_printed_plan_says_what_was_rejected_and_why():
    plan = _plan(DENSE // 8, world_size=1)
    line = next(line for line in str(plan).splitlines() if line.startswith("t: "))
    assert line.startswith("t: tt chosen; ")
    assert "fused rejected: it does not fit: 10." in line
    assert "MiB of host memory" in line
    assert "hkv rejected: it does not fit: 1" in line
    slow = str(_plan(1 << 30))
    assert "t: fused chosen;" in slow
    assert "hkv rejected: the slowest rank's tables would take" in slow
    assert "tt rejected: it would lose more quality" in slow
    assert str(pickle.loads(pickle.dumps(plan))) == str(plan)


def test_what_is_missing_is_what_there_is_too_little_of():
    rejected = _plan(DENSE // 8, world_size=1).plan["ebc"].reports["t"].rejected
    said = int(rejected["fused"].split("(")[1].split(" bytes")[0].replace(",", ""))
    # Beside the rows there are buffers of 8 bags and ids.
    assert said == DENSE - DENSE // 8 + 8 * DIM * 4 + 8 * 8
    exact = _plan(DENSE // 8 + said, world_size=1)
    assert _kernels(exact) == {"t": "fused"}


def test_options_of_each_backend():
    options = [TTOptions(ranks=4), HKVOptions(seed=3)]
    by_costs = {
        "hkv": {"fused": 3e-3, "hkv": 2e-3, "tt": 8e-3},
        "tt": {"fused": 3e-3, "hkv": 2e-3, "tt": 1e-3},
    }
    for chosen, costs in by_costs.items():
        plan = _plan(1 << 30, calibration(**costs), options=options, max_loss=1.0)
        sharding = plan.plan["ebc"]["t"]
        assert sharding.options == options[chosen == "hkv"]


def test_ids_that_are_no_row_numbers_leave_the_hash_table():
    frequencies = IdFrequencies.of_ids(torch.tensor([5, 5, 2**62]))
    plan = _plan(1 << 30, frequencies=frequencies)
    assert _kernels(plan) == {"t": "hkv"}
    rejected = plan.plan["ebc"].reports["t"].rejected
    for kernel in ("fused", "tt"):
        assert f"have id {2**62}, but {kernel} takes row numbers from 0 to" in rejected[kernel]


def test_ids_that_no_kernel_takes_are_refused():
    frequencies = IdFrequencies.of_ids(torch.tensor([-1, 5]))
    each = r"'ebc.embedding_bags.t' can't be served by any(?=.*fused: )(?=.*tt: ).*id -1"
    with pytest.raises(ValueError, match=each):
        _plan(1 << 30, kernels=["fused", "tt"], frequencies=frequencies)
    with pytest.raises(ValueError, match="have id -1, but tt takes row numbers"):
        _plan(1 << 30, kernels=["tt"], frequencies=frequencies)


def test_a_backend_that_refuses_the_table_is_passed_over():
    plan = _plan(
        1 << 30, options=TTOptions(precision="tf32"), measured=calibration(hkv=2, tt=1, fused=3)
    )
    assert _kernels(plan) == {"t": "hkv"}
    assert "precision is 'tf32'" in plan.plan["ebc"].reports["t"].rejected["tt"]


def test_a_settled_table_rejects_nothing():
    plan = _plan(1 << 30, kernels=["hkv"])
    assert plan.plan["ebc"].reports["t"].rejected == {}
    assert "rejected" not in str(plan)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_impossible_budget_is_refused_by_name_and_bytes(world_size):
    with pytest.raises(PlannerError) as refusal:
        _plan(
            1 << 20,
            names=("user", "page"),
            kernels=["fused", "hkv"],
            world_size=world_size,
        )
    assert refusal.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    text = str(refusal.value)
    assert text.count("\n") == 0
    assert "insufficient storage" in text
    for table in ("user", "page"):
        assert f"'ebc.embedding_bags.{table}' (at least 12.2 MiB of host memory on fused" in text
    missing = int(text.split("(")[1].split(" bytes")[0].replace(",", ""))
    # Buffers: ids and bags of all ranks arrive at every shard.
    buffers = 8 * (DIM * 4 + 8) * world_size
    assert missing == pytest.approx(2 * (DENSE + buffers) - world_size * (1 << 20), abs=2000)


def test_a_budget_that_one_table_exceeds_names_that_one():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in (("small", 10), ("large", ROWS))
    ]
    planner = _planner(("small", "large"), 1 << 20, kernels=["fused"], world_size=2)
    with pytest.raises(PlannerError) as refusal:
        planner.plan(make_model(tables), get_default_sharders())
    assert "'ebc.embedding_bags.large' (at least" in str(refusal.value)


def test_many_tables_that_leave_the_choice_open():
    names = [f"t{i}" for i in range(40)]
    plan = _plan(1 << 30, names=names, rows=2000)
    reports = plan.plan["ebc"].reports
    assert {report.kernel for report in reports.values()} == {"fused"}
    assert all(set(report.rejected) == {"hkv", "tt"} for report in reports.values())
    # Trying alternatives changed the plan's own options; their ranks must be restored.
    assert all(rank is not None for report in reports.values() for rank in report.ranks)


@pytest.mark.parametrize(
    ("hbm", "chosen"),
    [(1 << 30, None), (10 << 20, 9 << 20), (7 << 20, "index")],
)
def test_the_tier_of_a_table(hbm, chosen):
    """Rows in HBM, partly in HBM, or in host memory: the fastest choice that fits."""
    options = [HKVOptions(hbm_bytes=bytes_near) for bytes_near in (None, 9 << 20, "index")]
    constraint = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=["table_wise"], options=options
    )
    moved = {"ids": 1e-3, "moved_bytes": 1e-6, FIXED: 0.0}
    constants = Constants((Fit(1.0, moved, {"ids": 1e-3, FIXED: 0.0}),))
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=1, local_world_size=1, compute_device="cuda", hbm_cap=hbm, ddr_cap=1 << 30
        ),
        batch_size=8,
        constraints={"t": constraint},
        calibration=dataclasses.replace(calibration("cuda"), constants={"hkv": constants}),
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    table = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
    )
    plan = planner.plan(make_model([table]), get_default_sharders()).plan["ebc"]
    assert plan["t"].options.hbm_bytes == chosen
    rejected = plan.reports["t"].rejected
    assert len(rejected) == 2
    assert all(label.startswith("hkv (") for label in rejected)
    if chosen == "index":
        assert "it does not fit" in rejected["hkv (defaults)"]
        assert "of HBM" in rejected["hkv (defaults)"]
