"""The default eviction policy of hash tables and of dense tables."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.shards import table_shard
from torchrec_hkv import HKVOptions, backends
from torchrec_hkv.backends import TableShard
from torchrec_hkv.backends.hkv.table import memory_of, table_spec
from torchrec_hkv.hash_table import AgedLFU


def shard(**options) -> TableShard:
    values = {"name": "user", "num_embeddings": 2000, "embedding_dim": 8, "capacity": 2000}
    return table_shard(**values, dim=8, options=HKVOptions(**options))


def test_tables_are_adaptive():
    one = shard()
    assert table_spec(one, None).eviction == "adaptive"
    assert backends.get("hkv").describe(one.options) == ""
    assert memory_of(one, None).index_bytes > memory_of(shard(eviction="lfu"), None).index_bytes


def test_dense_tables_evict_nothing_and_are_lru():
    one = shard(dense=True)
    assert table_spec(one, None).eviction == "lru"
    assert memory_of(one, None) == memory_of(shard(dense=True, eviction="lru"), None)
    assert backends.get("hkv").identity(one, None)["eviction"] == "lru"


@pytest.mark.parametrize("eviction", ["lru", "lfu", AgedLFU(2.0), "epoch_lru"])
@pytest.mark.parametrize("dense", [False, True])
def test_a_named_policy_stays(eviction, dense):
    assert table_spec(shard(eviction=eviction, dense=dense), None).eviction == eviction


def test_files_of_lru_tables_load():
    backend = backends.get("hkv")
    own, saved = (backend.identity(it, None)["eviction"] for it in (shard(), shard(eviction="lru")))
    assert saved == "lru"
    assert backend.loads("eviction", saved, own)
    assert dataclasses.replace(HKVOptions(), dense=True) == HKVOptions(dense=True)
