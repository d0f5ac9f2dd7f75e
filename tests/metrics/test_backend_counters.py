"""Metrics of a backend that declares its own counters."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from tests.support.toy_backend import ToyBackend, ToyLookup, ToyTable
from torchrec_hkv import ParameterConstraints, register_backend
from torchrec_hkv.backends import DeviceCounters, names
from torchrec_hkv.metrics import collect


class CountingLookup(ToyLookup):
    """Returns counters on the device: some that metrics know, and one that they do not."""

    def device_counters(self):
        tables = list(reversed(self.tables))
        rows = [[len(table.rows), 7, table.lookups] for table in tables]
        keys = [table.shard.key for table in tables]
        return DeviceCounters(keys, ("size", "colour", "lookups"), torch.tensor(rows))


class CountingBackend(ToyBackend):
    name = "counting"

    def create_lookup(self, shards, feature_tables, optimizer, device):
        return CountingLookup([ToyTable(shard, optimizer) for shard in shards], feature_tables)


def _collect(rank, world_size, device):
    if "counting" not in names():
        register_backend(CountingBackend())
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=4, feature_names=[name])
        for name in ("a", "b")
    ]
    constraint = ParameterConstraints(compute_kernels=["counting"], sharding_types=["row_wise"])
    model = shard_model(make_model(tables), {"a": constraint, "b": constraint}, world_size, device)
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 3, 1, 5, 6, 6], device=device),
        lengths=torch.tensor([4, 3], device=device),
    )
    model(features)
    metrics = {name.rsplit(".", 1)[1]: table for name, table in collect(model).items()}
    return {name: (table.size, table.lookups, table.hits) for name, table in metrics.items()}


def test_counters_by_name(run_ranks):
    (found,) = run_ranks(1, _collect)
    assert found == {"a": (3, 4, 0), "b": (2, 3, 0)}
