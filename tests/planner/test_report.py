"""The printed plan names backends, and each rank's memory for each table."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.calibrations import calibration
from tests.support.models import make_model, topology
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    backends,
    get_default_sharders,
)
from torchrec_hkv.backends.protocol import StorageBytes
from torchrec_hkv.planner.report import ReportedModulePlan, TableReport, format_bytes

pytestmark = pytest.mark.compat


def _plan(device, measured=None):
    tables = [
        EmbeddingBagConfig(
            name="user", num_embeddings=100_000, embedding_dim=16, feature_names=["f"]
        ),
        EmbeddingBagConfig(name="hour", num_embeddings=24, embedding_dim=4, feature_names=["g"]),
    ]
    constraints = {
        "user": ParameterConstraints(
            compute_kernels=["hkv"],
            sharding_types=["row_wise"],
            options=HKVOptions(eviction="lfu", hbm_bytes=2 << 20),
        ),
        "hour": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(device)),
        constraints=constraints,
        calibration=measured,
    )
    return planner.plan(make_model(tables), get_default_sharders())


@pytest.mark.parametrize("planned_for", ["cpu", "cuda"])
def test_the_plan_prints_backends(planned_for):
    plan = _plan(planned_for)
    text = str(plan)
    assert "customized_kernel" not in text
    header, user = (
        next(x for x in text.splitlines() if x.startswith(n)) for n in ("table", "user")
    )
    for column in ("kernel", "sharding", "ranks", "rows", "host per rank"):
        assert column in header
    assert ("HBM per rank" in header) == (planned_for == "cuda")
    for cell in ("hkv", "row_wise", "0, 1", "50,000 x2"):
        assert cell in user
    assert "options of user: eviction=lfu, hbm_bytes=2097152" in text.splitlines()
    report = plan.plan["ebc"].reports["user"]
    for part in report.bytes:
        assert format_bytes(part.host) in user
        assert planned_for == "cpu" or format_bytes(part.hbm) in user
        assert (part.hbm > 0) == (planned_for == "cuda")
    hour = next(line for line in text.splitlines() if line.startswith("hour"))
    assert "fused" in hour
    assert "table_wise" in hour
    assert backends.get("hkv").describe(HKVOptions()) == ""


def test_the_plan_prints_alike_on_ranks_that_got_it():
    plan = _plan("cpu")
    copy = pickle.loads(pickle.dumps(plan))
    assert str(copy) == str(plan)
    assert copy.plan["ebc"]["user"].options == HKVOptions(eviction="lfu", hbm_bytes=2 << 20)


def test_a_plan_for_a_cpu_fits_80_columns():
    assert max(map(len, str(_plan("cpu")).splitlines())) <= 80


def test_tables_of_equal_options_share_a_line():
    reports = {
        f"table_{i}": TableReport(
            kernel="hkv",
            sharding_type="row_wise",
            ranks=(0,),
            rows=(5,),
            dim=4,
            bytes=(StorageBytes(0, 80),),
            options="eviction=lfu" if i < 19 else "seed=3",
        )
        for i in range(20)
    }
    lines = str(ReportedModulePlan({}, reports)).splitlines()
    assert "options of table_19: seed=3" in lines
    first = next(i for i, line in enumerate(lines) if line.startswith("options of table_0,"))
    named = " ".join(line.strip() for line in lines[first : first + 3])
    assert named == f"options of {', '.join(list(reports)[:19])}: eviction=lfu"
    assert max(map(len, lines[first : first + 3])) <= 80


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({}, "Times are not calibrated"),
        ({"hkv": 1.0}, "Times of hour are not calibrated"),
        ({"fused": 1.0}, "Times of user are not calibrated"),
        ({"hkv": 1.0, "fused": 1.0}, None),
    ],
    ids=["nothing", "hkv", "fused", "both"],
)
def test_times_that_were_not_measured_are_named(measured, said):
    plan = _plan("cpu", calibration("cpu", **measured) if measured else None)
    assert {name: report.calibrated for name, report in plan.plan["ebc"].reports.items()} == {
        "user": "hkv" in measured,
        "hour": "fused" in measured,
    }
    if said is None:
        assert "calibrated" not in str(plan)
    else:
        assert f"\n{said}: they come from nominal bandwidths." in str(plan)
        assert "torchrec-hkv calibrate" in str(plan)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (512, "512 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_have_units(count, text):
    assert format_bytes(count) == text
