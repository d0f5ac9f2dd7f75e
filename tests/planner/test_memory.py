"""The plan reports the memory that ranks use, may use, and have left."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner.memory import Memory, RankMemory, ReportedPlan, describe_memory

pytestmark = pytest.mark.compat

GIB = 1 << 30


def _tables(prefix):
    return [
        EmbeddingBagConfig(
            name=f"{prefix}{name}", num_embeddings=rows, embedding_dim=16, feature_names=[name]
        )
        for name, rows in (("user", 100_000), ("hour", 2_000))
    ]


def _plan(device):
    model = nn.ModuleDict({"one": make_model(_tables("a_")), "two": make_model(_tables("b_"))})
    constraints = {
        f"{prefix}{name}": ParameterConstraints(compute_kernels=[kernel], sharding_types=[kind])
        for prefix in ("a_", "b_")
        for name, kernel, kind in (("user", "hkv", "row_wise"), ("hour", "fused", "table_wise"))
    }
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(device)), constraints=constraints
    )
    plan = planner.plan(model, get_default_sharders())
    return plan, planner


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ranks_of_a_plan(device):
    plan, planner = _plan(device)
    kind = "hbm" if device == "cuda" else "host"
    reports = [report for module in plan.plan.values() for report in module.reports.values()]
    assert len(reports) == 4
    for rank, memory in enumerate(plan.memory):
        tables = sum(
            getattr(part, kind)
            for report in reports
            for owner, part in zip(report.ranks, report.bytes, strict=True)
            if owner == rank
        )
        storages = [
            shard.storage
            for option in planner._best_plan
            for shard in option.shards
            if shard.rank == rank
        ]
        used = sum(storage.hbm if kind == "hbm" else storage.ddr for storage in storages)
        found = getattr(memory, kind)
        assert (found.tables, found.used) == (tables, used)
        assert 0 < found.tables < found.used < found.budget
        # The planner reserves a part of the rank's memory.
        storage = planner._topology.devices[rank].storage
        assert found.budget < (storage.hbm if kind == "hbm" else storage.ddr)
    assert len(plan.memory) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_printed_plan_ends_with_it(device):
    plan, _ = _plan(device)
    text = str(plan)
    assert text.endswith(describe_memory(plan.memory))
    assert ("HBM     total" in text) == (device == "cuda")
    assert "host    total" in text
    assert str(pickle.loads(pickle.dumps(plan))) == text


def test_no_budget_is_no_table():
    assert describe_memory([]) == ""
    assert str(ReportedPlan({})) == ""


def _ranks(*used):
    return [RankMemory(Memory(u * GIB, (u + 1) * GIB, 80 * GIB), Memory()) for u in used]


def _lines(*used):
    return [line.split("  ") for line in describe_memory(_ranks(*used)).splitlines()[2:-1]]


def _cells(*used):
    return [[cell.strip() for cell in line if cell] for line in _lines(*used)]


def test_ranks_of_equal_figures_share_a_line():
    assert _cells(10, 10, 20, 10) == [
        ["HBM", "0-1, 3", "10.0 GiB", "11.0 GiB", "80.0 GiB", "69.0 GiB"],
        ["HBM", "2", "20.0 GiB", "21.0 GiB", "80.0 GiB", "59.0 GiB"],
        ["HBM", "total", "50.0 GiB", "54.0 GiB", "320.0 GiB", "266.0 GiB"],
    ]


def test_of_many_different_ranks_the_extremes_are_shown():
    assert [line[1:3] for line in _cells(10, 60, 30, 5, 40)] == [
        ["1 (fullest)", "60.0 GiB"],
        ["3 (emptiest)", "5.0 GiB"],
        ["total", "145.0 GiB"],
    ]


def test_one_rank_has_no_total():
    assert [line[1] for line in _cells(10)] == ["0"]


def test_more_than_the_budget_is_negative():
    assert _cells(90)[0][-1] == "-11.0 GiB"
