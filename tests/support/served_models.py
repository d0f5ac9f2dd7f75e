"""A model to train, export and serve: all kinds of tables, pooled and in sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions, serving
from torchrec_hkv.hash_table import Normal

BAGS = ["user", "item", "page", "country"]
WEIGHTED = ["likes", "tags"]
SEQUENCE = ["seen", "pages", "places"]
#: Rows of stock and Tensor-Train tables, whose ids are row numbers.
ROWS = 50
_META = torch.device("meta")


def _bags(name: str, dim: int, *features: str, mean: bool = False) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=dim,
        num_embeddings=ROWS,
        feature_names=list(features or [name]),
        pooling=PoolingType.MEAN if mean else PoolingType.SUM,
    )


def _sequence(name: str, dim: int) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=[name])


class ServedModel(nn.Module):
    """Scores from dense numbers, bags, weighted bags and sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                _bags("user", 12),
                _bags("item", 8, "item", "country", mean=True),
                _bags("page", 16, "page", mean=True),
                _bags("pages", 16, "page"),
                _bags("country", 20, "country"),
                _bags("city", 8, "country", mean=True),
            ],
            device=_META,
        )
        self.weighted = EmbeddingBagCollection(
            tables=[_bags("likes", 12), _bags("tags", 24), _bags("tag_pages", 16, "tags")],
            device=_META,
            is_weighted=True,
        )
        self.sequence = EmbeddingCollection(
            tables=[_sequence("seen", 8), _sequence("pages", 8), _sequence("places", 8)],
            device=_META,
        )
        self.dense = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.dropout = nn.Dropout(0.5)
        self.over = nn.Linear(8 + 88 + 52 + 24, 3)

    def forward(
        self, dense: Tensor, features: KeyedJaggedTensor, weighted: KeyedJaggedTensor
    ) -> dict[str, Tensor]:
        """Returns scores ``[samples, 3]``, and their inputs."""
        pooled = self.ebc(features)
        by_weight = self.weighted(weighted)
        sequences = self.sequence(features)
        parts = [self.dense(dense)]
        parts += [pooled[key] for key in sorted(pooled.keys())]
        parts += [by_weight[key] for key in sorted(by_weight.keys())]
        for key in SEQUENCE:
            sequence = sequences[key]
            lengths, rows = sequence.lengths(), sequence.values()
            samples = torch.arange(lengths.shape[0], device=rows.device)
            at = torch.repeat_interleave(samples, lengths, output_size=rows.shape[0])
            summed = torch.zeros(lengths.shape[0], rows.shape[1], device=rows.device)
            parts.append(summed.index_add(0, at, rows))
        made_of = torch.cat(parts, dim=1)
        return {"scores": self.over(self.dropout(made_of)).sigmoid(), "made_of": made_of}


def constraints(
    sharding: str = "table_wise", row_dtype: torch.dtype | None = None
) -> dict[str, ParameterConstraints]:
    """Returns the kernels of the tables. row_dtype: dtype of rows of hash tables."""
    hash_table = HKVOptions(seed=5, initializer=Normal(0.0, 0.1), row_dtype=row_dtype)
    kinds: dict[str, tuple[str, object]] = {
        "user": ("hkv", HKVOptions(seed=3, expire_after=2, row_dtype=row_dtype)),
        "item": ("hkv", hash_table),
        "likes": ("hkv", hash_table),
        "seen": ("hkv", hash_table),
        "page": ("tt", TTOptions(ranks=(4, 4))),
        "pages": ("tt", TTOptions(ranks=(4, 4))),
        "tag_pages": ("tt", TTOptions(ranks=(4, 4))),
    }
    result = {}
    for name in ("user", "item", "likes", "seen", "country", "city", "tags", "places", *kinds):
        kernel, options = kinds.get(name, ("fused", None))
        types = ["table_wise"] if kernel == "tt" else [sharding]
        result[name] = ParameterConstraints(
            compute_kernels=[kernel], options=options, sharding_types=types
        )
    return result


def make_served(
    world_size: int,
    device: torch.device,
    sharding: str = "table_wise",
    row_dtype: torch.dtype | None = None,
) -> DistributedModelParallel:
    """Creates the sharded model."""
    torch.manual_seed(1)
    model = ServedModel()
    for collection in (model.ebc, model.weighted, model.sequence):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    return shard_model(model, constraints(sharding, row_dtype), world_size, device)


def random_batch(
    seed: int, samples: int = 6, *, known: bool = False, device: str | torch.device = "cpu"
) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor]:
    """Creates arguments of the model. Ids of hash tables are any int64, from a small set."""
    generator = torch.Generator().manual_seed(seed)
    kinds: Mapping[str, bool] = {"user": True, "likes": True, "seen": True, "item": True}

    def features(keys: list[str], weighted: bool) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 5, (len(keys), samples), generator=generator)
        values = []
        for key, key_lengths in zip(keys, lengths, strict=True):
            numbers = torch.randint(0, ROWS, (int(key_lengths.sum()),), generator=generator)
            values.append(numbers * -7919 * 104729 * 15485863 if kinds.get(key) else numbers)
        flat = torch.cat(values)
        weights = torch.rand(flat.numel(), generator=generator) if weighted else None
        features_of_keys = KeyedJaggedTensor(
            keys=keys, values=flat, lengths=lengths.flatten(), weights=weights
        )
        return features_of_keys.to(torch.device(device))

    dense = torch.randn(samples, 4, generator=generator).to(device)
    return dense, features([*BAGS, *SEQUENCE], False), features(WEIGHTED, True)


def train(model: DistributedModelParallel, steps: int, seed: int = 100) -> None:
    """Trains a few steps."""
    optimizer = torch.optim.SGD(
        [p for n, p in model.named_parameters() if "dense" in n or "over" in n], lr=0.1
    )
    device = model.device
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        out = model(*random_batch(seed + step, device=device))
        out["scores"].square().mean().backward()
        optimizer.step()


#: Seeds of the batches of :func:`exported`; the batch of seed s has s + 2 samples.
SEEDS = (1, 2, 3)


def as_ids(features: KeyedJaggedTensor) -> tuple[Any, ...]:
    """Returns arguments of :class:`torchrec_hkv.serving.KeyedIds`."""
    keys = features.keys()
    lengths = features.lengths().view(len(keys), -1)
    return keys, features.values(), lengths, features.weights_or_none()


def outputs_of(model: nn.Module, seed: int, samples: int) -> dict[str, Tensor]:
    """Returns outputs of the model in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        out = model(*random_batch(seed, samples, device=model.device))
    model.train(was_training)
    return {key: value.cpu() for key, value in out.items()}


def exported(
    rank: int,
    world_size: int,
    device: torch.device,
    folder: Path,
    sharding: str = "table_wise",
    arguments: Mapping[str, Any] | None = None,
    steps: int = 4,
    row_dtype: torch.dtype | None = None,
) -> list[dict[str, Tensor]]:
    """Trains, exports, and returns outputs of an evaluation. Runs on each rank."""
    model = make_served(world_size, device, sharding, row_dtype)
    train(model, steps)
    before = outputs_of(model, 0, 5)
    serving.export(model, folder, inputs=random_batch(0, device=device), **(arguments or {}))
    assert model.training  # unchanged by the export
    after = outputs_of(model, 0, 5)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    return [outputs_of(model, seed, 2 + seed) for seed in SEEDS]
