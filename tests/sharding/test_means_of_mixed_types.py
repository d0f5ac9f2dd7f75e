"""Means and sums are correct for any mix of sharding types in a collection, and if tables of
several types share a feature."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints

pytestmark = pytest.mark.compat

ROWS, DIM = 64, 8
FEATURES = {"t0": ["f0", "f1"], "t1": ["f1"], "t2": ["f1", "f2"], "t3": ["f3"]}
POOLINGS = ("MEAN", "SUM", "MEAN", "SUM")
KEYS = ["f0", "f1", "f2", "f3"]
LENGTHS = torch.tensor([[2, 1, 3, 0], [1, 0, 2, 4], [3, 3, 0, 1], [0, 2, 2, 1]])


def _model(world_size, device, kernels, sharding_types):
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=features,
            pooling=PoolingType[pooling],
        )
        for (name, features), pooling in zip(FEATURES.items(), POOLINGS, strict=True)
    ]
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel], sharding_types=[sharding_type], min_partition=4
        )
        for name, kernel, sharding_type in zip(FEATURES, kernels, sharding_types, strict=True)
    }
    return shard_model(make_model(tables), constraints, world_size, device)


def _features(lengths, ids, device):
    return KeyedJaggedTensor(keys=KEYS, values=ids.to(device), lengths=lengths.flatten().to(device))


def _outputs(rank, world_size, device, kernels, sharding_types):
    """Outputs of bags, and of each of their ids as a bag, by key."""
    model = _model(world_size, device, kernels, sharding_types)
    ids = torch.arange(int(LENGTHS.sum())) + 7 * rank
    counts = LENGTHS.sum(1)
    longest = int(counts.max())
    alone = torch.stack([(torch.arange(longest) < n).long() for n in counts])
    model(_features(alone, ids, device)).sum().backward()  # imports rows of hash tables
    model.eval()
    with torch.no_grad():
        return model.module.keys, *(
            model(_features(lengths, ids, device)).cpu() for lengths in (LENGTHS, alone)
        )


TYPES = [
    (("hkv",) * 4, ("row_wise", "table_wise", "column_wise", "table_wise")),
    (("hkv",) * 4, ("column_wise", "row_wise", "grid_shard", "row_wise")),
    (("fused", "hkv", "hkv", "fused"), ("row_wise", "row_wise", "table_wise", "column_wise")),
    (("hkv", "fused", "fused", "hkv"), ("table_row_wise", "table_wise", "row_wise", "row_wise")),
]


@pytest.mark.parametrize(("kernels", "sharding_types"), TYPES)
def test_as_the_rows_say(run_ranks, kernels, sharding_types):
    for keys, got, alone in run_ranks(2, _outputs, kernels, sharding_types):
        pooling = dict(zip(FEATURES, POOLINGS, strict=True))
        tables = {f: [t for t, of in FEATURES.items() if f in of] for f in KEYS}
        for k, key in enumerate(keys):
            feature, _, table = key.partition("@")
            lengths = LENGTHS[KEYS.index(feature)]
            rows = alone[: int(lengths.sum()), k * DIM : (k + 1) * DIM]
            bags = torch.stack([part.sum(0) for part in rows.split(lengths.tolist())])
            if pooling[table or tables[feature][0]] == "MEAN":
                bags = bags / lengths.clamp(min=1)[:, None]
            torch.testing.assert_close(got[:, k * DIM : (k + 1) * DIM], bags)
