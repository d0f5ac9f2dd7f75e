"""Tables whose ranks or rows the planner chose train, and take the planned bytes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from tests.support.models import make_model
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner import IdFrequencies

pytestmark = pytest.mark.compat

_ROWS, _DIM = 20_000, 16
_DENSE = _ROWS * _DIM * 4


def _trained(rank, world_size, device, kernels):
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=[n])
        for n in ("a", "b")
    ]
    counts = 1e6 / torch.arange(1, _ROWS + 1, dtype=torch.float64)
    constraint = ParameterConstraints(
        compute_kernels=kernels,
        sharding_types=["table_wise", "row_wise"],
        frequencies=IdFrequencies.of_counts(counts),
    )
    room = round(1.4 * _DENSE / world_size)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=world_size,
            compute_device=device.type,
            **{"hbm_cap" if device.type == "cuda" else "ddr_cap": room},
            **({"ddr_cap": 1} if device.type == "cuda" else {}),
        ),
        batch_size=8,
        constraints={"a": constraint, "b": constraint},
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    model, sharders = make_model(tables), get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    ids = torch.randint(_ROWS, (64,), generator=torch.Generator().manual_seed(rank))
    features = KeyedJaggedTensor(
        ["a", "b"], ids.to(device), lengths=torch.ones(64, dtype=torch.int32).to(device)
    )
    losses = []
    for _ in range(3):
        loss = (sharded(features) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    reports = plan.plan["ebc"].reports
    taken = {
        key: (memory.hbm, memory.host)
        for key, lookup in sharded.module.ebc.group_lookups().items()
        for memory in [lookup.memory(key)]
    }
    planned = {
        name: (part.hbm, part.host)
        for name, report in reports.items()
        for part, owner in zip(report.bytes, report.ranks, strict=True)
        if owner == rank and report.loss is not None
    }
    lossy = {name: str(plan.plan["ebc"][name].options) for name, r in reports.items() if r.loss}
    return losses, planned, {name: taken[name] for name in planned}, lossy


@pytest.mark.parametrize(("kernel", "size"), [("tt", "ranks"), ("hkv", "capacity")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_train(run_ranks, world_size, kernel, size):
    results = run_ranks(world_size, _trained, ["fused", kernel])
    for losses, planned, taken, lossy in results:
        assert len(lossy) == 1
        assert re.search(rf"[ (]{size}=\d", next(iter(lossy.values())))
        assert losses[0] > losses[1] > losses[2]
        assert planned == taken
    assert any(planned for _, planned, _, _ in results)
