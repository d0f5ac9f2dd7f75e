"""Environment variables and the batch size set defaults for tables without constraints."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, topology
from tests.support.toy_backend import ToyOptions
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)
from torchrec_hkv.backends import registry

NAMES = ("user", "page", "hour")


def _plan(device="cpu", constraints=None, rows=1000, batch_size=8, **kwargs):
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=count, embedding_dim=8, feature_names=[f"f_{name}"]
        )
        for name, count in zip(NAMES, (rows, rows, 8), strict=True)
    ]
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(device)),
        constraints=constraints,
        batch_size=batch_size,
        **kwargs,
    )
    return planner.plan(make_model(tables), get_default_sharders()).plan["ebc"]


def _kernels(plan):
    return {name: report.kernel for name, report in plan.reports.items()}


def test_a_backend_for_all_tables(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_EMB_BACKEND", "hkv")
    constraints = {
        "page": ParameterConstraints(compute_kernels=["fused"]),
        "hour": ParameterConstraints(sharding_types=["table_wise"]),
    }
    plan = _plan(constraints=constraints)
    assert _kernels(plan) == {"user": "hkv", "page": "fused", "hour": "hkv"}
    assert plan.reports["hour"].sharding_type == "table_wise"


def test_backends_by_table(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_EMB_BACKEND", "user=hkv,page=tt,hour=DEFAULT")
    kernels = _kernels(_plan())
    assert (kernels["user"], kernels["page"]) == ("hkv", "tt")
    assert kernels["hour"] in ("dense", "fused")


def test_a_device_for_tables(monkeypatch):
    constraints = {
        "user": ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions(seed=3)),
        "page": ParameterConstraints(compute_kernels=["fused"]),
        "hour": ParameterConstraints(compute_kernels=["fused"]),
    }
    monkeypatch.setenv("TORCHREC_HKV_EMB_DEVICE", "user=host,page=cpu,hour=cuda")
    plan = _plan("cuda", constraints)
    assert _kernels(plan) == {"user": "hkv", "page": "fused_uvm", "hour": "fused"}
    assert plan["user"].options == HKVOptions(seed=3, hbm_bytes="index")
    taken = plan.reports["user"].bytes
    assert sum(part.host for part in taken) >= 1000 * 8 * 4
    assert 0 < sum(part.hbm for part in taken) < 1000 * 8 * 4
    several = [HKVOptions(seed=3), HKVOptions(seed=3, hbm_bytes=1 << 30)]
    constraints["user"] = ParameterConstraints(compute_kernels=["hkv"], options=several)
    plan = _plan("cuda", constraints)
    assert plan["user"].options == HKVOptions(seed=3, hbm_bytes="index")
    assert plan.reports["user"].rejected == {}
    # On a CPU all tables are in host memory.
    assert _kernels(_plan("cpu", constraints)) == {"user": "hkv", "page": "fused", "hour": "fused"}


def test_a_backend_that_can_t_lie_there(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_EMB_DEVICE", "host")
    constraints = {"user": ParameterConstraints(compute_kernels=["toy"])}
    with pytest.raises(ValueError, match="Backend 'toy' can't keep tables in host memory"):
        _plan("cuda", constraints)


def test_rows_in_host_memory_alone_keep_the_index_in_hbm():
    backend = registry.get("hkv")
    assert backend.on_host(HKVOptions(eviction="lfu")).hbm_bytes == "index"
    with pytest.raises(ValueError, match="hbm_bytes is 'all', but must be None, 'index' or"):
        HKVOptions(hbm_bytes="all")
    with pytest.raises(ValueError, match="can't keep tables in host memory"):
        registry.get("toy").on_host(ToyOptions())


@pytest.mark.parametrize("batch_size", [8, 1000, 1001])
def test_replicated_up_to_the_batch_size(batch_size):
    constraints = {"page": ParameterConstraints(compute_kernels=["hkv"])}
    plan = _plan(constraints=constraints, batch_size=batch_size, shard_by_batch_size=True)
    types = {name: report.sharding_type for name, report in plan.reports.items()}
    assert types["hour"] == "data_parallel"
    assert (types["user"] == "data_parallel") == (batch_size >= 1000)
    assert plan.reports["page"].kernel == "hkv"
    assert types["page"] != "data_parallel"


def test_the_batch_size_of_the_environment(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_BATCH_SIZE", "1000")
    plan = _plan(batch_size=None, shard_by_batch_size=True)
    assert plan.reports["user"].sharding_type == "data_parallel"
    plan = _plan(batch_size=999, shard_by_batch_size=True)
    assert plan.reports["user"].sharding_type != "data_parallel"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EMB_BACKEND", "hkw", "compute kernel 'hkw'"),
        ("EMB_BACKEND", "use=hkv", r"EMB_BACKEND names tables \['use'\], but the model has"),
        ("EMB_DEVICE", "tpu", "EMB_DEVICE has 'tpu' for table"),
        ("EMB_DEVICE", "use=cpu", r"EMB_DEVICE names tables \['use'\]"),
        ("BATCH_SIZE", "many", "TORCHREC_HKV_BATCH_SIZE is 'many'"),
    ],
)
def test_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(f"TORCHREC_HKV_{name}", value)
    with pytest.raises(ValueError, match=message):
        _plan(batch_size=None)
