"""A sharded table that grows trains like one with its full capacity from the start."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad

from tests.support.models import make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, checkpoint

ROWS, BATCH, STEPS = 4000, 64, 12


def _model(world_size, device, sharding_type, initial):
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=[sharding_type],
        options=HKVOptions(initial_capacity=initial),
    )
    model = make_model([table], RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})
    return shard_model(model, {"t": constraint}, world_size, device)


def _features(rank, step, device):
    generator = torch.Generator().manual_seed(100 * rank + step)
    lengths = torch.randint(0, 6, (BATCH,), generator=generator)
    # Each step has more ids.
    ids = torch.randint(0, 80 * (step + 1), (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["f"], values=ids.to(device), lengths=lengths.to(device))


def _train(model, rank, device, steps):
    outputs = []
    for step in steps:
        output = model(_features(rank, step, device))
        output.square().sum().backward()
        outputs.append(output.detach())
    return torch.cat(outputs)


def _compare(rank, world_size, device, sharding_type, folder):
    outputs = []
    for initial in (100, None):
        model = _model(world_size, device, sharding_type, initial)
        outputs.append(_train(model, rank, device, range(STEPS)))
    assert torch.equal(*outputs)
    # The checkpoint is of a partly grown table; the loading table has not grown.
    model = _model(world_size, device, sharding_type, 100)
    _train(model, rank, device, range(3))
    checkpoint.save(folder, model)
    fresh = _model(world_size, device, sharding_type, 100)
    checkpoint.load(folder, fresh)
    rest = range(3, STEPS)
    assert torch.equal(_train(fresh, rank, device, rest), _train(model, rank, device, rest))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_trains_alike(run_ranks, tmp_path, sharding_type, world_size):
    run_ranks(world_size, _compare, sharding_type, tmp_path / "checkpoint")
