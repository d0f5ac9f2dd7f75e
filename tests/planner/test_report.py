"""The printed plan names backends, and says what every rank gives to each table."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, topology
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    backends,
    get_default_sharders,
)
from torchrec_hkv.planner.report import format_bytes

pytestmark = pytest.mark.compat


def _plan(device):
    tables = [
        EmbeddingBagConfig(
            name="user", num_embeddings=100_000, embedding_dim=16, feature_names=["f"]
        ),
        EmbeddingBagConfig(name="hour", num_embeddings=24, embedding_dim=4, feature_names=["g"]),
    ]
    constraints = {
        "user": ParameterConstraints(
            compute_kernels=["hkv"],
            sharding_types=["row_wise"],
            options=HKVOptions(eviction="lfu", hbm_bytes=2 << 20),
        ),
        "hour": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(device)), constraints=constraints
    )
    return planner.plan(make_model(tables), get_default_sharders())


@pytest.mark.parametrize("planned_for", ["cpu", "cuda"])
def test_the_plan_prints_backends(planned_for):
    plan = _plan(planned_for)
    text = str(plan)
    assert "customized_kernel" not in text
    header, user = (
        next(x for x in text.splitlines() if x.startswith(n)) for n in ("table", "user")
    )
    for column in ("kernel", "sharding", "ranks", "rows", "HBM per rank", "host per rank"):
        assert column in header
    for cell in ("hkv", "row_wise", "0, 1", "50,000 x2", "eviction=lfu", "hbm_bytes=2097152"):
        assert cell in user
    report = plan.plan["ebc"].reports["user"]
    for part in report.bytes:
        assert format_bytes(part.hbm) in user
        assert format_bytes(part.host) in user
        assert (part.hbm > 0) == (planned_for == "cuda")
    hour = next(line for line in text.splitlines() if line.startswith("hour"))
    assert "fused" in hour
    assert "table_wise" in hour
    assert backends.get("hkv").describe(HKVOptions()) == ""


def test_the_plan_prints_alike_on_ranks_that_got_it():
    plan = _plan("cpu")
    copy = pickle.loads(pickle.dumps(plan))
    assert str(copy) == str(plan)
    assert copy.plan["ebc"]["user"].options == HKVOptions(eviction="lfu", hbm_bytes=2 << 20)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (512, "512 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_have_units(count, text):
    assert format_bytes(count) == text
