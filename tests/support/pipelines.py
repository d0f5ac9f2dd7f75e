"""A model with bags and sequences on tables with evictions, for train pipelines."""

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
from torchrec_hkv.sharding import table_counters

ROWS, DIM, BATCH = 128, 8, 16
KEYS = ["f", "g", "h"]


class PipelineModel(nn.Module):
    """Returns a loss and predictions, for the pipelines."""

    def __init__(self, bags: EmbeddingBagCollection, sequences: EmbeddingCollection) -> None:
        super().__init__()
        self.ebc = bags
        self.ec = sequences
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, ``[]``, and the prediction of each sample, ``[BATCH]``."""
        pooled = self.ebc(features)
        sequence = self.ec(features)["h"]
        prediction = self.over(torch.cat([pooled["f"], pooled["g"]], dim=1)).squeeze(1)
        loss = (prediction - 1).square().sum() + sequence.values().square().sum()
        return loss, prediction.detach()


def make_pipeline_model(
    world_size: int, device: torch.device, sharding_type: str
) -> DistributedModelParallel:
    """Creates tables ``t`` (bags) and ``q`` (sequences) on ``hkv``, and ``s`` (bags) on stock."""
    meta = torch.device("meta")
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[feature]
            )
            for name, feature in (("t", "f"), ("s", "g"))
        ],
        device=meta,
    )
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name="q", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["h"])
        ],
        device=meta,
    )
    for collection in (bags, sequences):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.05})
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel], sharding_types=[sharding_type], options=options
        )
        for name, kernel, options in (
            ("t", "hkv", HKVOptions(seed=1, deterministic=True)),
            ("q", "hkv", HKVOptions(eviction="lfu", deterministic=True)),
            ("s", "fused", None),
        )
    }
    torch.manual_seed(7)
    model = PipelineModel(bags, sequences)
    model.over.to(device)
    sharded = shard_model(model, constraints, world_size, device)
    state = sharded.state_dict()
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(ROWS, DIM, generator=generator)
    for shard in state["ebc.embedding_bags.s.weight"].local_shards():
        first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(rows[first : first + count])
    return sharded


def pipeline_batch(rank: int, step: int, device: torch.device) -> KeyedJaggedTensor:
    """Creates a batch. The steps have more distinct ids than ``t`` and ``q`` have rows."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    lengths = torch.randint(0, 4, (3 * BATCH,), generator=generator)
    ids = []
    for key, part in zip(KEYS, lengths.split(BATCH), strict=True):
        highest = ROWS if key == "g" else 4 * ROWS
        ids.append(torch.randint(0, highest, (int(part.sum()),), generator=generator))
    ids[0] = ids[0] * 2**40 - 1
    return KeyedJaggedTensor(
        keys=KEYS, values=torch.cat(ids).to(device), lengths=lengths.to(device)
    )


def evicted(model: DistributedModelParallel) -> dict[str, int]:
    """Returns the number of evictions of each table on this rank, by table name."""
    return {
        key.rpartition(".")[2]: counts["evicted"] for key, counts in table_counters(model).items()
    }
