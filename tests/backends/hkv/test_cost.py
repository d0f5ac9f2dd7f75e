"""The planner's counts for a step on a hash table equal those of the table."""

from __future__ import annotations

import pytest
import torch

from tests.support.shards import table_shard
from torchrec_hkv.backends import OptimizerSpec, registry
from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.backends.workload import IdFrequencies, Workload


def _shard(capacity, **options):
    return table_shard(capacity, 8, HKVOptions(**options))


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("ids", [1000, 4000])
def test_new_ids_of_a_step(eviction, ids):
    shard, backend, optimizer = _shard(2000, eviction=eviction), registry.get("hkv"), "sgd"
    lookup = backend.create_lookup([shard], [0], OptimizerSpec(optimizer), torch.device("cpu"))
    lookup.train()
    generator = torch.Generator().manual_seed(4)
    inserted, steps, count = 0, 40, 500
    for step in range(2 * steps):
        if step == steps:
            inserted = lookup.counters("t")["inserted"]
        drawn = torch.randint(ids, (count,), generator=generator)
        output = lookup(drawn, torch.arange(count + 1), None, count, torch.tensor(0.1))
        output.sum().backward()
    inserted = (lookup.counters("t")["inserted"] - inserted) / steps
    frequencies = IdFrequencies(((ids, 1.0),))
    load = Workload(count, frequencies.distinct(count), count, frequencies)
    predicted = backend.work(shard, OptimizerSpec(optimizer), load, "cpu").forward["new"]
    assert predicted == pytest.approx(inserted, rel=0.1, abs=2)


def test_rows_that_are_fetched():
    backend, optimizer = registry.get("hkv"), OptimizerSpec("adagrad")
    load = Workload(ids=400, distinct=300, bags=400)
    near = backend.work(_shard(100_000), optimizer, load, "cuda")
    assert "moved_bytes" not in near.forward
    everything = backend.work(_shard(100_000, hbm_bytes="index"), optimizer, load, "cuda")
    assert everything.forward["moved_bytes"] == 300 * 8 * 8
    some = backend.work(_shard(100_000, hbm_bytes=6 << 20), optimizer, load, "cuda")
    assert 0 < some.forward["moved_bytes"] < everything.forward["moved_bytes"]
    assert (
        "moved_bytes"
        not in backend.work(_shard(100_000, hbm_bytes="index"), optimizer, load, "cpu").forward
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["hkv", "tt"])
def test_tables_that_are_timed_can_be(name, device_type):
    backend = registry.get(name)
    for case in backend.calibration_cases(device_type):
        shard = table_shard(case.capacity, case.dim, case.options)
        backend.check(shard, case.optimizer, device_type)
        storage = backend.storage(shard, case.optimizer, device_type)
        assert storage.hbm + storage.host < 16 << 30
        load = Workload(1000, 900, 1000)
        work = backend.work(shard, case.optimizer, load, device_type)
        if name == "hkv" and case.options.hbm_bytes is not None:
            assert work.forward["moved_bytes"] > 0
            assert storage.host > 0
        else:
            assert storage.hbm == 0 or storage.host == 0
