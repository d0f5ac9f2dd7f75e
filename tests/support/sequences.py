"""Trains stock ``fused`` tables and tables of a backend on sequences of the same ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from tests.support.stock_comparison import (
    BATCH,
    CAPACITY,
    IDS,
    KEYS,
    OPTIMIZERS,
    STEPS,
    UNNAMED,
    codecs_registry,
    draw_sizes,
    raw_ids,
    variable_sizes,
)
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.sharding import BackendEmbeddingCollectionSharder

DIM = 8

#: Keys of the output; feature f1 has two tables.
OUTPUTS = ["f0", "f1@t0", "f1@t1", "f2", "g"]


@dataclasses.dataclass(frozen=True)
class SequenceScenario:
    """A training scenario.

    Attributes:
        backend: name of the backend.
        sharding_type: sharding type of all tables.
        optimizer: a key of ``OPTIMIZERS`` or ``UNNAMED``.
        need_indices: whether the collection returns the ids.
        variable: whether each feature has its own batch size.
        wire: dtype of the output exchange, a ``CommType``; None for float32.
        dedup: whether backend tables send each id once; stock tables never do.
        fused_params: fused parameters of the sharder.
    """

    backend: str
    sharding_type: str
    optimizer: str = "sgd"
    need_indices: bool = False
    dedup: bool = False
    variable: bool = False
    wire: str | None = None
    fused_params: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class SequenceOutcome:
    """Results of one rank, stock tables first.

    Attributes:
        losses: losses, ``[steps, 2]``.
        rows: rows of each key, ``[2, ids, dim]``.
        lookups: number of ids that backend tables looked up in training on this rank.
    """

    losses: torch.Tensor
    rows: dict[str, torch.Tensor]
    lookups: int


class SequenceModel(nn.Module):
    """A named collection of sequences."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.ec = collection

    def forward(self, features: KeyedJaggedTensor):
        """Returns the collection's output."""
        return self.ec(features)


def sequence_configs(rows: int, dim: int = DIM) -> list[EmbeddingConfig]:
    """Creates two tables that share a feature, and a static table."""
    features = {"t0": (rows, ["f0", "f1"]), "t1": (rows, ["f1", "f2"]), "s": (IDS, ["g"])}
    return [
        EmbeddingConfig(name=name, num_embeddings=count, embedding_dim=dim, feature_names=names)
        for name, (count, names) in features.items()
    ]


def shard_sequences(
    scenario: SequenceScenario, rows: int, kernel: str, world_size: int, device: torch.device
) -> DistributedModelParallel:
    """Creates a sharded model; ``kernel`` is for all tables but the static one."""
    collection = EmbeddingCollection(
        tables=sequence_configs(rows),
        device=torch.device("meta"),
        need_indices=scenario.need_indices,
    )
    optimizer, kwargs = {**OPTIMIZERS, **UNNAMED}[scenario.optimizer]
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, collection.parameters(), dict(kwargs))
    constraints = {
        name: ParameterConstraints(
            compute_kernels=["fused" if name == "s" else kernel],
            sharding_types=[scenario.sharding_type],
            min_partition=4,
        )
        for name in ("t0", "t1", "s")
    }
    sharder = BackendEmbeddingCollectionSharder(
        dict(scenario.fused_params or {}),
        use_index_dedup=scenario.dedup and kernel != "fused",
        qcomm_codecs_registry=codecs_registry(scenario.wire),
    )
    return shard_model(SequenceModel(collection), constraints, world_size, device, [sharder])


def sequence_features(ids, lengths, device, inverse=None) -> KeyedJaggedTensor:
    """Creates a batch of the four features."""
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.cat(ids).to(device),
        lengths=torch.cat(lengths).to(device),
        **variable_sizes(lengths, inverse, device),
    )


def probe(model: nn.Module, ids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Reads the row of every id without training.

    Returns:
        For each key, ``[IDS, dim]``.
    """
    lengths = [torch.tensor([IDS, 0])] * 4
    model.eval()
    outputs = model(sequence_features([ids, ids, ids, torch.arange(IDS)], lengths, device))
    rows = {key: outputs[key].values().detach().cpu() for key in OUTPUTS}
    model.train()
    return rows


def copy_rows(model: DistributedModelParallel, rows: dict[str, torch.Tensor]) -> None:
    """Sets the rows of stock tables, by table name."""
    state = model.state_dict()
    for name, table in rows.items():
        for shard in state[f"ec.embeddings.{name}.weight"].local_shards():
            (first, column), (count, dim) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(table[first : first + count, column : column + dim])


def train_sequences(
    rank: int, world_size: int, device: torch.device, scenario: SequenceScenario
) -> SequenceOutcome:
    """Trains both models. Runs on every rank."""
    torch.manual_seed(11)
    stock = shard_sequences(scenario, IDS, "fused", world_size, device)
    backend_model = shard_sequences(scenario, CAPACITY, scenario.backend, world_size, device)
    mapped = raw_ids()
    rows = probe(backend_model, mapped, device)
    copy_rows(stock, {"t0": rows["f0"], "t1": rows["f2"], "s": rows["g"]})
    generator = torch.Generator().manual_seed(100 + rank)
    before = _lookups(backend_model)
    losses = []
    for step in range(STEPS):
        # Rank 0 has a batch without ids. TorchRec refuses batches without samples.
        longest = 1 if step == 3 and rank == 0 else 4
        sizes, inverse = [BATCH] * len(KEYS), None
        if scenario.variable:
            sizes, inverse = draw_sizes(generator)
        lengths = [torch.randint(0, longest, (size,), generator=generator) for size in sizes]
        ids = [torch.randint(0, IDS, (int(n.sum()),), generator=generator) for n in lengths]
        losses.append([])
        for model, sent in (
            (stock, ids),
            (backend_model, [mapped[ids[0]], mapped[ids[1]], mapped[ids[2]], ids[3]]),
        ):
            outputs = model(sequence_features(sent, lengths, device, inverse))
            if scenario.need_indices:
                expected_ids = [sent[0], sent[1], sent[1], sent[2], sent[3]]
                for key, given in zip(OUTPUTS, expected_ids, strict=True):
                    assert outputs[key].weights().tolist() == given.tolist()
            loss = torch.zeros((), device=device)
            for key in OUTPUTS:
                values = outputs[key].values()
                assert values.shape == (int(outputs[key].lengths().sum()), DIM)
                weights = torch.arange(1, values.shape[0] + 1, device=device)[:, None]
                loss = loss + (values.square() * weights / 10 + values).sum()
            loss.backward()
            losses[-1].append(float(loss.detach()))
    lookups = _lookups(backend_model) - before
    expected, got = probe(stock, torch.arange(IDS), device), probe(backend_model, mapped, device)
    return SequenceOutcome(
        losses=torch.tensor(losses, dtype=torch.float64),
        rows={key: torch.stack([expected[key], got[key]]) for key in OUTPUTS},
        lookups=lookups,
    )


def _lookups(model: DistributedModelParallel) -> int:
    lookups = model.module.ec.group_lookups()
    return sum(lookup.counters(key)["lookups"] for key, lookup in lookups.items())
