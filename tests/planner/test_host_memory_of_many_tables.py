"""Many tables use HBM and host memory before any of them loses quality."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from tests.support.models import make_model
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders

pytestmark = pytest.mark.compat

_DIM = 64


def _plan(rows, hbm, host, gpus):
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=count, embedding_dim=_DIM, feature_names=[f"f{i}"]
        )
        for i, count in enumerate(rows)
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=gpus,
            local_world_size=gpus,
            compute_device="cuda",
            hbm_cap=round(hbm / gpus),
            ddr_cap=round(host / gpus),
        ),
        batch_size=64,
        constraints={
            table.name: ParameterConstraints(compute_kernels=["fused", "hkv", "tt"])
            for table in tables
        },
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    model = make_model(tables, device=torch.device("meta"))
    return planner.plan(model, get_default_sharders())


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("rows", [[200_000] * 8, [50_000, 100_000, 150_000, 250_000, 350_000] * 2])
def test_neither_memory_is_enough_alone(rows, gpus):
    dense = 4 * _DIM * sum(rows)
    # HBM holds 65 % of the tables' bytes and host memory 60 %. Indices take a part of both.
    plan = _plan(rows, 0.65 * dense + (32 << 20), 0.6 * dense, gpus)
    reports = plan.plan["ebc"].reports
    assert {name for name, report in reports.items() if report.loss} == set()
    assert {report.kernel for report in reports.values()} == {"fused", "hkv"}
    for rank in plan.memory:
        assert rank.hbm.used <= rank.hbm.budget
        assert rank.host.used <= rank.host.budget
