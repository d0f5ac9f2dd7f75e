"""Tensor-Train tables without an optimizer use FBGEMM's default: SGD at 0.01."""

from __future__ import annotations

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.sharding.test_data_parallel import DIM, FEATURES, ROWS, Model, batch_of, lookups_of
from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints, TTOptions
from torchrec_hkv.sharding import (
    BackendEmbeddingBagCollectionSharder,
    BackendEmbeddingCollectionSharder,
)

TABLES = ("t", "u")


def _make(world_size, device, kind, sharding_type, fused_params, optimizer):
    make, config, sharder = {
        "bags": (EmbeddingBagCollection, EmbeddingBagConfig, BackendEmbeddingBagCollectionSharder),
        "sequences": (EmbeddingCollection, EmbeddingConfig, BackendEmbeddingCollectionSharder),
    }[kind]
    tables = [
        config(name=n, num_embeddings=ROWS[n], embedding_dim=DIM, feature_names=FEATURES[n])
        for n in TABLES
    ]
    collection = make(tables=tables, device=torch.device("meta"))
    if optimizer is not None:
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), optimizer)
    constraint = ParameterConstraints(
        compute_kernels=["tt"], sharding_types=[sharding_type], options=TTOptions(ranks=3)
    )
    torch.manual_seed(0)
    constraints = dict.fromkeys(TABLES, constraint)
    return shard_model(
        Model(collection), constraints, world_size, device, [sharder(dict(fused_params))]
    )


def _cores(model):
    return {
        name: [core.cpu().clone() for core in lookup.cores(name)]
        for name, lookup in lookups_of(model).items()
    }


def _train(rank, world_size, device, kind, sharding_type, fused_params, optimizer):
    model = _make(world_size, device, kind, sharding_type, fused_params, optimizer)
    before = _cores(model)
    for step in range(3):
        model(batch_of(step, rank, device, TABLES, False, [6] * world_size)).sum().backward()
    return before, _cores(model)


@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("rate", [None, 0.1])
def test_equal_to_sgd(run_ranks, device_type, kind, sharding_type, rate):
    told = {} if rate is None else {"learning_rate": rate}
    unnamed = run_ranks(2, _train, kind, sharding_type, told, None)
    named = run_ranks(2, _train, kind, sharding_type, {}, {"lr": rate or 0.01})
    for (before, actual), (_, expected) in zip(unnamed, named, strict=True):
        assert actual.keys() == expected.keys()
        for name, cores in actual.items():
            # A GPU adds gradients of cores in undefined order.
            tolerance = 1e-5 if device_type == "cuda" else 0.0
            torch.testing.assert_close(cores, expected[name], rtol=tolerance, atol=tolerance / 10)
            assert not any(map(torch.equal, cores, before[name]))
