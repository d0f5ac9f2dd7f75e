"""Planned bytes equal the bytes that tables and exchanges take when the plan runs."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad

from tests.support.models import make_model, plan_model, shard_model, topology
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.hash_table import MinFrequency
from torchrec_hkv.planner.options import is_backend_option

pytestmark = pytest.mark.compat

ROWS, DIM, BATCH, LENGTH = 5000, 16, 256, 4
_OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
}


def _model(optimizer):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
    )
    return make_model([table], *_OPTIMIZERS[optimizer])


def _constraints(kernel, sharding_type, options):
    return {
        "t": ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=[sharding_type],
            options=options,
            pooling_factors=[float(LENGTH)],
            min_partition=4,
        )
    }


def _bytes(rank, world_size, device, kernel, sharding_type, optimizer, options):
    """Planned and actual bytes, as (HBM, host), of this rank."""
    constraints = _constraints(kernel, sharding_type, options)
    plan = plan_model(_model(optimizer), constraints, world_size, device)
    report = plan.plan["ebc"].reports["t"]
    own = [part for part, owner in zip(report.bytes, report.ranks, strict=True) if owner == rank]
    model = shard_model(_model(optimizer), constraints, world_size, device)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ids = torch.randint(ROWS, (BATCH * LENGTH,), generator=generator)
        lengths = torch.full((BATCH,), LENGTH)
        features = KeyedJaggedTensor(["f"], ids.to(device), lengths=lengths.to(device))
        model(features).sum().backward()
    lookups = model.module.ebc.group_lookups()
    taken = [lookup.memory(key) for key, lookup in lookups.items()]
    return (
        (sum(part.hbm for part in own), sum(part.host for part in own)),
        (sum(part.hbm for part in taken), sum(part.host for part in taken)),
    )


@pytest.mark.parametrize(
    ("kernel", "sharding_type", "optimizer", "options"),
    [
        ("hkv", "row_wise", "sgd", None),
        ("hkv", "row_wise", "adam", HKVOptions(eviction="lfu")),
        ("hkv", "table_wise", "rowwise_adagrad", HKVOptions(hbm_bytes=200_000)),
        ("hkv", "column_wise", "rowwise_adagrad", None),
        ("hkv", "row_wise", "adam", HKVOptions(capacity=2000)),
        ("hkv", "table_wise", "adam", HKVOptions(row_dtype=torch.float16, hbm_bytes=200_000)),
        (
            "hkv",
            "row_wise",
            "rowwise_adagrad",
            HKVOptions(admission=MinFrequency(3, entries=4000), expire_after=5),
        ),
        ("tt", "table_wise", "sgd", TTOptions(ranks=8)),
        ("tt", "table_wise", "adam", TTOptions(compression_ratio=10, num_cores=4)),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_tables(run_ranks, world_size, kernel, sharding_type, optimizer, options):
    results = run_ranks(world_size, _bytes, kernel, sharding_type, optimizer, options)
    assert any(sum(planned) for planned, _ in results)
    for planned, taken in results:
        assert planned == pytest.approx(taken, rel=0.05)


def _exchanged(rank, world_size, device, kernel, sharding_type):
    """Planned bytes of buffers, and actual bytes of a step's ids and rows, of this rank."""
    constraints = _constraints(kernel, sharding_type, None)
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, device), constraints=constraints, batch_size=BATCH
    )
    options = planner._enumerator.enumerate(_model("sgd"), get_default_sharders())
    (option,) = [option for option in options if is_backend_option(option)]
    tables = planner._enumerator.storage_estimator.table_bytes(option, {})
    planned = [
        shard.storage.hbm + shard.storage.ddr - table.hbm - table.host
        for shard, table in zip(option.shards, tables, strict=True)
    ]
    module = shard_model(_model("sgd"), constraints, world_size, device).module.ebc
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(ROWS, (BATCH * LENGTH,), generator=generator)
    features = KeyedJaggedTensor(
        ["f"], ids.to(device), lengths=torch.full((BATCH,), LENGTH).to(device)
    )
    context = module.create_context()
    received = module.input_dist(context, features).wait().wait()
    rows = module.compute(context, received)
    taken = sum(part.values().numel() * 8 for part in received)
    taken += sum(part.numel() * part.element_size() for part in rows)
    module.output_dist(context, rows).wait()
    return planned, taken


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers(run_ranks, world_size, sharding_type):
    results = run_ranks(world_size, _exchanged, "hkv", sharding_type)
    planned = results[0][0]
    assert sum(planned) == pytest.approx(sum(taken for _, taken in results), rel=0.05)
