"""Metrics of tables equal those of a Python model, wherever the tables are."""

import dataclasses
import math

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables
from tests.support.small_models import batch, make_small
from torchrec_hkv import HKVAdamOptimizer
from torchrec_hkv.hash_table import HashTable, MinFrequency
from torchrec_hkv.metrics import TableMetrics, collect


def test_one_embedding(device_type):
    embedding = make_embedding(8, device_type, max_capacity=64, init_capacity=64)
    HKVAdamOptimizer(embedding)
    embedding(torch.arange(40, device=device_type))
    embedding(torch.arange(20, 70, device=device_type))
    (metrics,) = collect(embedding).values()
    # 20 ids of the second call were present; of 30 new ones, 24 got a free slot.
    assert (metrics.lookups, metrics.hits, metrics.inserted) == (90, 20, 70)
    assert (metrics.evicted, metrics.refused, metrics.expired) == (6, 0, 0)
    assert (metrics.size, metrics.capacity, metrics.load_factor) == (64, 64, 1.0)
    assert metrics.hit_rate == pytest.approx(20 / 90)
    on_gpu = device_type == "cuda"
    assert (metrics.hbm_bytes > 0) == on_gpu
    assert (metrics.host_bytes > 0) != on_gpu
    assert metrics.hbm_bytes + metrics.host_bytes >= 64 * 8 * 4 * 3


def test_tables_of_a_model_have_its_paths_as_names(device_type):
    model = torch.nn.ModuleDict(
        {"one": make_embedding(device=device_type), "two": make_tables(2, device=device_type)}
    )
    model["two"]([torch.arange(5, device=device_type), torch.arange(3, device=device_type)])
    sizes = {name: metrics.size for name, metrics in collect(model).items()}
    assert sizes == {"one.embedding": 0, "two.table_0": 5, "two.table_1": 3}


def test_a_hash_table(device_type):
    table = HashTable(4, 100, device=device_type, admission=MinFrequency(2, entries=100))
    ids = torch.arange(10, device=device_type)
    for _ in range(3):
        table.find_or_insert(ids)
    metrics = collect(table)["table"]
    assert (metrics.unadmitted, metrics.inserted, metrics.hits) == (10, 10, 10)


def test_a_table_without_lookups_has_no_rate():
    assert math.isnan(collect(make_embedding())["embedding"].hit_rate)


def test_metrics_add_up_and_tell_what_was_since():
    one = TableMetrics(*range(1, 24))
    two = TableMetrics(*range(10, 240, 10))
    assert dataclasses.astuple(one + two) == tuple(11 * k for k in range(1, 24))
    counts = tuple(9 * k for k in range(1, 12))
    assert dataclasses.astuple(two.since(one)) == (*counts, *range(120, 240, 10))


def test_hit_rates_by_memory():
    metrics = TableMetrics(lookups=200, hits=150, host_hits=30)
    assert metrics.hit_rate == pytest.approx(0.75)
    assert metrics.hbm_hit_rate == pytest.approx(0.6)
    assert metrics.host_hit_rate == pytest.approx(0.15)
    assert math.isnan(TableMetrics().hbm_hit_rate)
    assert math.isnan(TableMetrics().host_hit_rate)


def test_ids_that_come_back(device_type):
    options = {"max_capacity": 64, "init_capacity": 64, "remember_evicted": 1 << 20}
    embedding = make_embedding(8, device_type, **options)
    tables = make_tables(2, device=device_type)
    for first in (0, 50, 100, 0):
        embedding(torch.arange(first, first + 50, device=device_type))
        tables([torch.arange(first, first + 50, device=device_type)] * 2)
    metrics = collect(embedding)["embedding"]
    # The first fifty ids were evicted before they returned.
    assert (metrics.inserted, metrics.evicted, metrics.returned) == (200, 136, 50)
    assert collect(tables)["table_0"].returned == 0


def _sharded(rank, world_size, device, over_all):
    model = make_small(world_size, device, "hkv")
    seen = [set() for _ in range(world_size)]
    lookups = 0
    for step in range(3):
        for other in range(world_size):
            features = batch(other, device, step)
            ids = features["f"].values().tolist()
            lookups += len(ids)
            seen[other].update(ids)
            if other == rank:
                model(features).sum().backward()
    group = torch.distributed.group.WORLD if over_all else None
    metrics = collect(model, group)
    return metrics, lookups, len(set().union(*seen))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_model_over_all_ranks(world_size, run_ranks):
    for metrics, lookups, distinct in run_ranks(world_size, _sharded, True):
        assert list(metrics) == ["ebc.embedding_bags.t"]
        assert (
            metrics["ebc.embedding_bags.t"].lookups,
            metrics["ebc.embedding_bags.t"].inserted,
        ) == (lookups, distinct)
        assert metrics["ebc.embedding_bags.t"].size == distinct
        assert metrics["ebc.embedding_bags.t"].capacity >= 256
        assert (
            metrics["ebc.embedding_bags.t"].hbm_bytes + metrics["ebc.embedding_bags.t"].host_bytes
            > 256 * 16
        )


def test_a_sharded_model_on_each_rank(run_ranks):
    results = run_ranks(2, _sharded, False)
    total = sum((metrics["ebc.embedding_bags.t"] for metrics, *_ in results), TableMetrics())
    assert (total.lookups, total.size) == results[0][1:]


@pytest.mark.parametrize("source", [5, torch.zeros(3), None])
def test_what_has_no_tables_at_all(source):
    with pytest.raises(TypeError, match="Metrics need a model, a module"):
        collect(source)


def test_a_model_without_tables_of_ours():
    with pytest.raises(ValueError, match="There are no tables of this package"):
        collect(torch.nn.Linear(2, 2))
