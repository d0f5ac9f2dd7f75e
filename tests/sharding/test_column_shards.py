"""Column shards keep and evict the same rows: a column-wise table trains as on one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints
from torchrec_hkv.sharding import table_counters

ROWS, DIM, BATCH, STEPS = 128, 12, 16, 25


def _model(world_size, device, sharding_type, options):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
    )
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=[sharding_type],
        min_partition=4,
        options=options,
    )
    model = make_model([table], torch.optim.SGD, {"lr": 0.1})
    return shard_model(model, {"t": constraint}, world_size, device)


def _train(model, rank, device):
    outputs = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        lengths = torch.randint(0, 5, (BATCH,), generator=generator)
        ids = torch.randint(-300, 300, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(
            keys=["f"], values=(ids * 2**40).to(device), lengths=lengths.to(device)
        )
        output = model(features)
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return torch.cat(outputs)


def _compare(rank, world_size, device, sharding_type, options):
    whole, columns = (
        _model(world_size, device, chosen, options) for chosen in ("table_wise", sharding_type)
    )
    torch.testing.assert_close(
        _train(columns, rank, device), _train(whole, rank, device), rtol=0, atol=0
    )
    tables = {}
    for model in (whole, columns):
        for key, lookup in model.module.ebc.group_lookups().items():
            state = lookup._group.export_table(lookup._index[key])
            kept = {name: getattr(state, name).cpu() for name in ("ids", "occupied", "last_steps")}
            tables[sharding_type if model is columns else "whole", key] = kept
    evicted = [counts["evicted"] for counts in table_counters(columns).values()]
    return tables, evicted


OPTIONS = {
    "lru": HKVOptions(seed=3),
    "lfu": HKVOptions(eviction="lfu"),
    "growing": HKVOptions(initial_capacity=32),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding_type", ["column_wise", "table_column_wise"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_as_on_one_rank(run_ranks, device_type, options, sharding_type, world_size):
    chosen = OPTIONS[options]
    if device_type == "cuda":  # otherwise it is random which new ids a full bucket takes
        chosen = dataclasses.replace(chosen, deterministic=True)
    results = run_ranks(world_size, _compare, sharding_type, chosen)
    tables = {key: kept for tables, _ in results for key, kept in tables.items()}
    assert set(tables) == {
        ("whole", "t"),
        (sharding_type, "t"),
        (sharding_type, "t/4"),
        (sharding_type, "t/8"),
    }
    for kept in tables.values():
        for name, tensor in kept.items():
            assert torch.equal(tensor, tables["whole", "t"][name]), name
    evicted = {count for _, counts in results for count in counts}
    assert len(evicted) == 1
    assert evicted.pop() > 100
