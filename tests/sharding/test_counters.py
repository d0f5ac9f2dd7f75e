"""``table_counters`` returns the counters of each rank's tables."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.sharding import table_counters


def _count(rank: int, world_size: int, device: torch.device) -> dict[str, dict[str, int]]:
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=640, embedding_dim=4, feature_names=[f"f_{name}"]
        )
        for name in ("ours", "stock")
    ]
    constraints = {
        "ours": ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"]),
        "stock": ParameterConstraints(compute_kernels=["fused"], sharding_types=["row_wise"]),
    }
    model = shard_model(make_model(tables), constraints, world_size, device)
    for _ in range(3):
        ids = torch.arange(50) - 25  # the same on all ranks
        features = KeyedJaggedTensor(
            keys=["f_ours", "f_stock"],
            values=torch.cat([ids, ids.abs()]).to(device),
            lengths=torch.ones(100, dtype=torch.int64, device=device),
        )
        model(features).sum().backward()
    return table_counters(model)


def test_counters(run_ranks):
    for world_size in (1, 2):
        results = run_ranks(world_size, _count)
        assert all(result.keys() == {"ebc.embedding_bags.ours"} for result in results)
        total = {
            key: sum(result["ebc.embedding_bags.ours"][key] for result in results)
            for key in results[0]["ebc.embedding_bags.ours"]
        }
        assert total["lookups"] == 3 * 50 * world_size
        assert total["size"] == total["inserted"] == 50
        assert total["hits"] == 2 * 50 * world_size
        assert total["evicted"] == total["refused"] == 0
        assert total["capacity"] == 640
