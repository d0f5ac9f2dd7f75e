"""The smallest model with a table on a backend and a stock table, and a few training steps."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints

#: Ids that a step draws from; some tests look for them.
IDS = (-(2**63), -1, 0, 5, 2**40 + 3, 2**62, 2**63 - 1)

BATCH = 4


def make_small(
    world_size: int,
    device: torch.device,
    backend: str,
    sharding_type: str = "row_wise",
    rows: int = 256,
    dim: int = 4,
) -> DistributedModelParallel:
    """Creates table ``t`` of feature ``f`` on the backend, and stock table ``s`` of feature ``g``.

    Args:
        world_size: number of ranks.
        device: device of the tables.
        backend: name of the backend.
        sharding_type: sharding type of both tables.
        rows: rows of ``t``, over all ranks.
        dim: dim of ``t``.
    """
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]),
        EmbeddingBagConfig(name="s", num_embeddings=16, embedding_dim=4, feature_names=["g"]),
    ]
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel], sharding_types=[sharding_type], min_partition=4
        )
        for name, kernel in (("t", backend), ("s", "fused"))
    }
    model = make_model(tables, RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})
    return shard_model(model, constraints, world_size, device)


def batch(rank: int, device: torch.device, seed: int, dtype=torch.int64) -> KeyedJaggedTensor:
    """Creates a batch of both features, which depends on rank and seed."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    lengths = torch.randint(0, 3, (2 * BATCH,), generator=generator)
    count = int(lengths[:BATCH].sum())
    ids = torch.tensor(IDS)[torch.randint(0, len(IDS), (count,), generator=generator)]
    rows = torch.randint(0, 16, (int(lengths[BATCH:].sum()),), generator=generator)
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.cat([ids, rows]).to(dtype).to(device),
        lengths=lengths.to(device),
    )


def outputs_and_train(
    model: DistributedModelParallel, rank: int, device: torch.device, steps: int, seed: int = 0
) -> torch.Tensor:
    """Trains a few steps.

    Returns:
        The outputs, ``[steps, BATCH, dims]``.
    """
    outputs = []
    for step in range(steps):
        output = model(batch(rank, device, seed + step))
        output.square().sum().backward()
        outputs.append(output.detach())
    return torch.stack(outputs)
