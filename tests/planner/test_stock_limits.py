"""A table with several kernels gets no stock kernel that FBGEMM can't make."""

from __future__ import annotations

import pytest
import torch
import torchrec
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import make_model, shard_model
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders

SGD = torchrec.optim.SGD
_META = torch.device("meta")


def _module(dim, is_sequence, applied, data_type=DataType.FP32, **arguments):
    config = {"name": "t", "num_embeddings": 100, "embedding_dim": dim, "feature_names": ["f"]}
    config["data_type"] = data_type
    if is_sequence:
        model = EmbeddingCollection([EmbeddingConfig(**config)], device=_META)
    else:
        model = EmbeddingBagCollection([EmbeddingBagConfig(**config)], device=_META)
    apply_optimizer_in_backward(applied, model.parameters(), {"lr": 0.1, **arguments})
    return model


def _plan(model, device_type="cpu", kernels=("fused", "hkv")):
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device=device_type),
        constraints={"t": ParameterConstraints(compute_kernels=list(kernels))},
    )
    return planner.plan(model, get_default_sharders()).plan[""]


@pytest.mark.parametrize(
    ("dim", "is_sequence", "device_type", "optimizer", "arguments", "reason"),
    [
        (3, False, "cpu", SGD, {}, "a shard has 3 columns, but fused takes multiples of 4"),
        (130, True, "cuda", SGD, {}, "a shard has 130 columns, but fused takes multiples of 4"),
        (8, False, "cpu", torch.optim.Adam, {}, "stock tables lack the optimizer adam on a CPU"),
        (8, False, "cuda", torch.optim.Adam, {}, None),
        (8, True, "cpu", SGD, {"clip_value": 0.1}, "stock tables lack the argument clip_value"),
        (8, False, "cuda", torchrec.optim.Adam, {"step_mode": "row"}, "the argument step_mode"),
        (8, True, "cpu", SGD, {"weight_decay": 0.1}, None),
        (8, False, "cpu", SGD, {"optimizer": "ftrl"}, "stock tables lack the optimizer ftrl"),
    ],
)
def test_reasons(dim, is_sequence, device_type, optimizer, arguments, reason):
    plan = _plan(_module(dim, is_sequence, optimizer, **arguments), device_type)
    report = plan.reports["t"]
    assert report.kernel == ("hkv" if reason else "fused")
    assert reason is None or reason in report.rejected["fused"]


@pytest.mark.parametrize(("device_type", "kernel"), [("cpu", "hkv"), ("cuda", "fused")])
def test_bf16(device_type, kernel):
    report = _plan(_module(8, False, SGD, DataType.BF16), device_type).reports["t"]
    assert report.kernel == kernel
    assert kernel == "fused" or "stock tables lack bf16 rows on a CPU" in report.rejected["fused"]


def test_all_reasons_in_an_error():
    model = _module(8, False, torchrec.optim.LAMB)
    with pytest.raises(ValueError, match=r"lack the optimizer lamb on a CPU.*tt: .* is 'lamb'"):
        _plan(model, kernels=("fused", "tt"))


def _trained(rank, world_size, device):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=3, feature_names=["f"])
    ]
    model = make_model(tables)
    constraints = {"t": ParameterConstraints(compute_kernels=["fused", "hkv"])}
    model = shard_model(model, constraints, world_size, device)
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    model(batch.to(device)).sum().backward()
    return True


def test_the_plan_can_be_made(run_ranks):
    assert run_ranks(1, _trained) == [True]
