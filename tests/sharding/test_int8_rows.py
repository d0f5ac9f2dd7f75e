"""int8 rows train like float32 rows, in a quarter of the memory."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints

ROWS, DIM, BATCH = 4096, 64, 64


def _model(world_size, device, row_dtype, sharding_type="row_wise", *, config="fp32", **options):
    tables = [
        EmbeddingBagConfig(
            name="t",
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=["f"],
            data_type=DataType(config.upper()),
        )
    ]
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=[sharding_type],
        min_partition=32,
        options=HKVOptions(row_dtype=row_dtype, **options),
    )
    model = make_model(tables, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6})
    return shard_model(model, {"t": constraint}, world_size, device)


def _trained(rank, world_size, device, row_dtype, sharding_type, config="fp32"):
    model = _model(world_size, device, row_dtype, sharding_type, config=config)
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        lengths = torch.randint(1, 5, (BATCH,), generator=generator)
        ids = torch.randint(500, (int(lengths.sum()),), generator=generator) * 0x9E3779B97F4A7C1
        batch = KeyedJaggedTensor(["f"], ids.to(device), lengths=lengths.to(device))
        out = model(batch)
        target = torch.linspace(-1, 1, DIM, device=device)
        loss = (out - target).square().mean()
        loss.backward()
        losses.append(float(loss))
    (lookup,) = [lookup for _, lookup in local_tables(model).items()] or [None]
    memory = None
    if lookup is not None:
        held = lookup.memory("t")
        memory = held.hbm + held.host
    return losses, memory


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_as_rows_of_float32(run_ranks, sharding_type):
    narrow = run_ranks(2, _trained, torch.int8, sharding_type)
    wide = run_ranks(2, _trained, None, sharding_type)
    for (losses, _), (exact, _) in zip(narrow, wide, strict=True):
        assert exact[-1] < 0.7 * exact[0]
        assert losses == pytest.approx(exact, rel=0.02)
        assert losses != exact


def test_by_the_config(run_ranks):
    told = run_ranks(1, _trained, torch.int8, "row_wise")
    assert run_ranks(1, _trained, None, "row_wise", "int8") == told


def test_memory(run_ranks):
    ((_, narrow),) = run_ranks(1, _trained, torch.int8, "table_wise")
    ((_, wide),) = run_ranks(1, _trained, None, "table_wise")
    assert wide - narrow == (3 * DIM - 4) * ROWS


def _refused(rank, world_size, device, sharding_type, options):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        _model(world_size, device, torch.int8, sharding_type, **options)
    return str(caught.value)


def test_columns_are_not_sharded(run_ranks):
    for message in run_ranks(2, _refused, "column_wise", {}):
        assert "a shard has 32 of 64 columns, but a row of torch.int8" in message


def test_dense_tables_are_refused():
    with pytest.raises(ValueError, match=r"row_dtype is torch.int8 and dense is True, but "):
        HKVOptions(row_dtype=torch.int8, dense=True)
