"""Ids at the ends of int64 and around zero train like rows of a Python dictionary."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.backends import BACKENDS
from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints

IDS = [-(2**63), -1, 0, 2**62, 2**63 - 1]
LEARNING_RATE = 0.1
BATCH = 3


def _bags(rank: int, step: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(31 * step + rank)
    return [
        [IDS[i] for i in torch.randint(0, len(IDS), (length,), generator=generator)]
        for length in torch.randint(0, 4, (BATCH,), generator=generator)
    ]


def _features(bags, device):
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor([i for bag in bags for i in bag], dtype=torch.int64, device=device),
        lengths=torch.tensor([len(bag) for bag in bags], device=device),
    )


def _train(rank, world_size, device, backend, sharding_type):
    table = EmbeddingBagConfig(name="t", num_embeddings=256, embedding_dim=4, feature_names=["f"])
    constraint = ParameterConstraints(compute_kernels=[backend], sharding_types=[sharding_type])
    model = make_model([table], torch.optim.SGD, {"lr": LEARNING_RATE})
    model = shard_model(model, {"t": constraint}, world_size, device)
    rows = model(_features([[i] for i in IDS], device))
    (rows * 0).sum().backward()
    dictionary = dict(zip(IDS, rows.detach().cpu().double(), strict=True))
    for step in range(10):
        output = model(_features(_bags(rank, step), device))
        output.square().sum().backward()
        gradients = dict.fromkeys(IDS, 0.0)
        for other in range(world_size):
            for bag in _bags(other, step):
                pooled = sum((dictionary[i] for i in bag), torch.zeros(4, dtype=torch.float64))
                for i in bag:
                    gradients[i] = gradients[i] + 2 * pooled / world_size
        expected = [
            sum((dictionary[i] for i in bag), torch.zeros(4, dtype=torch.float64))
            for bag in _bags(rank, step)
        ]
        torch.testing.assert_close(
            output.detach().cpu().double(), torch.stack(expected), rtol=1e-5, atol=1e-5
        )
        for i, gradient in gradients.items():
            dictionary[i] = dictionary[i] - LEARNING_RATE * gradient
    rows = model(_features([[i] for i in IDS], device)).detach().cpu().double()
    torch.testing.assert_close(
        rows, torch.stack([dictionary[i] for i in IDS]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trains_as_a_dictionary(run_ranks, backend, sharding_type, world_size):
    run_ranks(world_size, _train, backend, sharding_type)
