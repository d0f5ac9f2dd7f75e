"""Models of stock tables and of ``hkv`` tables in dense-compatible mode, of equal shape."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints

ROWS, DIM, BATCH = 37, 8, 6


class DenseModel(nn.Module):
    """Bags of table ``t`` and sequences of table ``q``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        fields = {"num_embeddings": ROWS, "embedding_dim": DIM}
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t", feature_names=["f"], **fields)], device=device
        )
        self.ec = EmbeddingCollection(
            tables=[EmbeddingConfig(name="q", feature_names=["g"], **fields)], device=device
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns all looked-up values, ``[n]``."""
        bags, sequences = self.ebc(features)["f"], self.ec(features)["g"].values()
        return torch.cat([bags.flatten(), sequences.flatten()])


def dense_model(
    world_size: int,
    device: torch.device,
    kernel: str,
    sharding_types: tuple[str, str],
    optimizer: type[torch.optim.Optimizer] | None,
    kwargs: dict,
    unsharded: torch.device | None = None,
) -> DistributedModelParallel:
    """Creates a sharded model.

    Args:
        world_size: number of ranks.
        device: device of the tables.
        kernel: ``"fused"``, or ``"hkv"`` for tables in dense-compatible mode.
        sharding_types: sharding types of ``t`` and ``q``.
        optimizer: optimizer to apply in backward, or None.
        kwargs: arguments of the optimizer.
        unsharded: device of the unsharded weights; meta if None.
    """
    model = DenseModel(unsharded or torch.device("meta"))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, model.parameters(), dict(kwargs))
    options = HKVOptions(dense=True, seed=5) if kernel == "hkv" else None
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=[sharding_type],
            min_partition=4,
            options=options,
        )
        for name, sharding_type in zip(("t", "q"), sharding_types, strict=True)
    }
    return shard_model(model, constraints, world_size, device)


def dense_batch(rank: int, step: int, device: torch.device) -> KeyedJaggedTensor:
    """Creates a batch of row numbers."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (2 * BATCH,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["f", "g"], values=ids.to(device), lengths=lengths.to(device))


def train_dense(
    model: DistributedModelParallel, rank: int, device: torch.device, steps: range
) -> torch.Tensor:
    """Trains; returns all outputs."""
    outputs = []
    for step in steps:
        output = model(dense_batch(rank, step, device))
        (output.square().sum() + output.sum()).backward()
        outputs.append(output.detach().cpu())
    return torch.cat(outputs)
