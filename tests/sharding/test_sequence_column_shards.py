"""Column shards of an ``EmbeddingCollection`` that TorchRec would send wrongly are refused."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints

DIM = 16


def _sharded(world_size, device, kernels, widths):
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            name=name, feature_names=[f"f_{name}"], embedding_dim=DIM, num_embeddings=500
        )
        for name in ("a", "b")
    ]
    model = EmbeddingCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    constraints = {
        table.name: ParameterConstraints(
            compute_kernels=[kernel], sharding_types=["column_wise"], min_partition=width
        )
        for table, kernel, width in zip(tables, kernels, widths, strict=True)
    }
    return shard_model(model, constraints, world_size, device)


def _outputs(rank, world_size, device, widths):
    model = _sharded(world_size, device, ("hkv", "hkv"), widths)
    batch = KeyedJaggedTensor(
        ["f_a", "f_b"], torch.arange(7), lengths=torch.tensor([2, 1, 0, 4])
    ).to(device)
    found = model(batch)
    sum(rows.values().sum() for rows in found.values()).backward()
    return {name: rows.values().detach().cpu() for name, rows in found.items()}


def test_equal_widths(run_ranks):
    whole, halves = (run_ranks(2, _outputs, (width, width))[1] for width in (DIM, DIM // 2))
    assert all(torch.equal(whole[name], halves[name]) for name in ("f_a", "f_b"))


def _refused(rank, world_size, device, kernels):
    match = r"Table 'b' has a shard of 16 columns and table 'a' one of 8, but column shards in an"
    with pytest.raises(ValueError, match=match):
        _sharded(world_size, device, kernels, (DIM // 2, DIM))


@pytest.mark.parametrize("kernels", [("hkv", "hkv"), ("hkv", "fused"), ("fused", "fused")])
def test_other_widths(kernels, run_ranks):
    run_ranks(2, _refused, kernels)
