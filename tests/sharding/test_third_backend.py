"""A backend registered from outside the package trains under DistributedModelParallel."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import local_tables, make_model, shard_model
from tests.support.toy_backend import ToyOptions, initial_row
from torchrec_hkv import ParameterConstraints

IDS = [-(2**63), -1, 0, 2**62, 2**63 - 1]


def _train(rank, world_size, device, sharding_type):
    table = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])
    constraint = ParameterConstraints(
        compute_kernels=["toy"], sharding_types=[sharding_type], options=ToyOptions(seed=3)
    )
    model = shard_model(make_model([table]), {"t": constraint}, world_size, device)
    features = KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor(IDS, device=device),
        lengths=torch.ones(len(IDS), dtype=torch.int64, device=device),
    )
    first = model(features)
    first.sum().backward()
    second = model(features)
    lookups = local_tables(model)
    rows = lookups["t"]._table("t").rows if lookups else {}
    initial = [initial_row(lookups["t"].tables[0].shard, i).tolist() for i in rows]
    return first.tolist(), second.tolist(), list(rows), initial


def test_third_backend_trains(run_ranks):
    for sharding_type in ("row_wise", "table_wise"):
        results = run_ranks(2, _train, sharding_type)
        owned = [i for _, _, ids, _ in results for i in ids]
        assert sorted(owned) == IDS
        initial = {i: row for _, _, ids, rows in results for i, row in zip(ids, rows, strict=True)}
        for first, second, _, _ in results:
            torch.testing.assert_close(torch.tensor(first), torch.tensor([initial[i] for i in IDS]))
            # Both ranks looked up every id once; TorchRec divides gradients by the world size.
            torch.testing.assert_close(torch.tensor(second), torch.tensor(first) - 0.1)
