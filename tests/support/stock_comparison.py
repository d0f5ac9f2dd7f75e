"""Trains stock ``fused`` tables and tables of a backend on the same ids, from equal rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import LAMB, SGD, PartialRowWiseAdam, RowWiseAdagrad

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.sharding import BackendEmbeddingBagCollectionSharder

#: Distinct ids. Stock tables have them as rows 0 .. IDS - 1.
IDS = 40

#: Rows of a backend's table, enough to avoid evictions on all ranks.
CAPACITY = 16 * IDS

KEYS = ["f0", "f1", "f2", "g"]
OUTPUTS = {None: torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BATCH = 6
STEPS = 12

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}),
}

#: Optimizers that not every backend has.
MORE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6}),
    "clipped": (
        SGD,
        {"lr": 0.02, "gradient_clipping": True, "max_gradient": 0.25},
    ),
}

#: Optimizers that stock tables have on GPUs only. Their CPU kernels ignore weight decay.
GPU_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "rowwise_adagrad_coupled": (
        RowWiseAdagrad,
        {"lr": 0.1, "weight_decay": 0.05, "weight_decay_mode": WeightDecayMode.L2},
    ),
    "rowwise_adagrad_decoupled": (
        RowWiseAdagrad,
        {"lr": 0.1, "weight_decay": 0.05, "weight_decay_mode": WeightDecayMode.DECOUPLE},
    ),
    "rowwise_adagrad_max_norm": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6, "max_norm": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.05}),
    "rowwise_adam": (PartialRowWiseAdam, {"lr": 0.01, "eps": 1e-6, "beta1": 0.8}),
    "lamb": (LAMB, {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.05}),
}

#: No optimizer is applied in the backward: the fused parameters of the sharder decide.
UNNAMED: dict[str, tuple[None, dict[str, Any]]] = {"none": (None, {})}

_ALL_OPTIMIZERS = {**OPTIMIZERS, **MORE_OPTIMIZERS, **GPU_OPTIMIZERS, **UNNAMED}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A training scenario.

    Attributes:
        backend: name of the backend.
        sharding_type: sharding type of all tables.
        pooling: ``"sum"``, ``"mean"`` or ``"weighted"`` (a weighted sum).
        optimizer: a key of one of the dictionaries above.
        batches: ``"equal"``, ``"variable"`` (each feature has its own batch size) or ``"absent"``
            (rank 0 has no samples in some steps; in the last of these, no rank has samples).
        narrow: whether rank 0 sends int32 ids, which are then the same as those of stock tables.
        wire: dtype of the output exchange, a ``CommType``; None for float32.
        columns: least number of columns of a column-wise shard.
        trained: whether to run backwards.
        output: dtype of the output, ``"fp16"`` or ``"bf16"``; None to set no dtype, for float32.
        rows: dtype of rows of the backend's tables, ``"fp16"`` or ``"bf16"``; None for float32.
        stock_rows: the same for stock tables.
        fused_params: fused parameters of the sharder, besides the dtype of the output.
        steps: number of steps.
    """

    backend: str
    sharding_type: str
    pooling: str
    optimizer: str
    batches: str = "equal"
    narrow: bool = False
    wire: str | None = None
    columns: int | None = 4
    trained: bool = True
    output: str | None = None
    rows: str | None = None
    stock_rows: str | None = None
    fused_params: Mapping[str, Any] | None = None
    steps: int = STEPS


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one rank, stock tables first.

    Attributes:
        losses: losses, ``[steps, 2]``.
        rows: rows of each table, ``[2, ids, dim]``.
    """

    losses: torch.Tensor
    rows: dict[str, torch.Tensor]


def raw_ids() -> torch.Tensor:
    """Returns ids for row numbers: distinct, spread over int64, and the same on all ranks.

    Returns:
        int64 ``[IDS]``.
    """
    generator = torch.Generator().manual_seed(5)
    high = torch.randint(-(2**31), 2**31, (IDS,), generator=generator)
    ids = high * 2**32 + torch.arange(IDS)
    ids[:5] = torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 1])
    return ids


def _tables(
    rows: int, pooling: PoolingType, data_type: DataType, static_type: DataType
) -> list[EmbeddingBagConfig]:
    """Creates two tables that share a feature and differ in dim, and a static table."""
    return [
        EmbeddingBagConfig(
            name="t0",
            num_embeddings=rows,
            embedding_dim=8,
            feature_names=["f0", "f1"],
            pooling=pooling,
            data_type=data_type,
        ),
        EmbeddingBagConfig(
            name="t1",
            num_embeddings=rows,
            embedding_dim=12,
            feature_names=["f1", "f2"],
            pooling=pooling,
            data_type=data_type,
        ),
        EmbeddingBagConfig(
            name="s",
            num_embeddings=IDS,
            embedding_dim=4,
            feature_names=["g"],
            pooling=pooling,
            data_type=static_type,
        ),
    ]


def _shard(
    scenario: Scenario, rows: int, kernel: str, world_size: int, device: torch.device
) -> DistributedModelParallel:
    optimizer, kwargs = _ALL_OPTIMIZERS[scenario.optimizer]
    pooling = PoolingType.MEAN if scenario.pooling == "mean" else PoolingType.SUM
    stock_type = DataType((scenario.stock_rows or "fp32").upper())
    our_type = DataType((scenario.rows or "fp32").upper())
    tables = _tables(rows, pooling, stock_type if kernel == "fused" else our_type, stock_type)
    model = make_model(tables, optimizer, kwargs, is_weighted=scenario.pooling == "weighted")
    constraints = {
        name: ParameterConstraints(
            compute_kernels=["fused" if name == "s" else kernel],
            sharding_types=[scenario.sharding_type],
            min_partition=scenario.columns,
        )
        for name in ("t0", "t1", "s")
    }
    return shard_model(model, constraints, world_size, device, _sharders(scenario))


def codecs_registry(wire: str | None) -> dict[str, Any] | None:
    """Returns the sharders' codecs for exchanges with a ``CommType``; None for None."""
    if wire is None:
        return None
    precision = CommType(wire)
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision)
    )


def _sharders(scenario: Scenario) -> list[Any]:
    registry = codecs_registry(scenario.wire)
    told = dict(scenario.fused_params or {})
    if scenario.output is not None:
        told["output_dtype"] = SparseType(scenario.output)
    return [BackendEmbeddingBagCollectionSharder(told, qcomm_codecs_registry=registry)]


def draw_sizes(generator: torch.Generator) -> tuple[list[int], torch.Tensor]:
    """Draws a number of bags per feature, and the bag of each sample, ``[features, BATCH]``."""
    sizes = torch.randint(1, BATCH + 1, (len(KEYS),), generator=generator).tolist()
    bags = [torch.randint(0, size, (BATCH,), generator=generator) for size in sizes]
    return sizes, torch.stack(bags)


def variable_sizes(
    lengths: list[torch.Tensor], inverse: torch.Tensor | None, device: torch.device
) -> dict[str, Any]:
    """Returns arguments of a KeyedJaggedTensor whose features have different batch sizes."""
    if inverse is None:
        return {}
    return {
        "stride_per_key_per_rank": [[n.numel()] for n in lengths],
        "inverse_indices": (KEYS, inverse.to(device)),
    }


def _features(
    ids: list[torch.Tensor],
    lengths: list[torch.Tensor],
    weights: torch.Tensor | None,
    device: torch.device,
    inverse: torch.Tensor | None = None,
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.cat(ids).to(device),
        lengths=torch.cat(lengths).to(device),
        weights=None if weights is None else weights.to(device),
        **variable_sizes(lengths, inverse, device),
    )


@dataclasses.dataclass
class _Batch:
    """Row numbers of a step on one rank.

    Attributes:
        lengths: bag lengths of each feature.
        ids: ids of each feature.
        weights: weights of all ids.
        inverse: ``[features, BATCH]``, the bag of each sample, if batch sizes vary.
        target: target of each sample.
    """

    lengths: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: torch.Tensor
    inverse: torch.Tensor | None
    target: torch.Tensor

    @classmethod
    def draw(cls, scenario: Scenario, rank: int, step: int, generator: torch.Generator) -> _Batch:
        longest = 1 if step == 3 and rank == 0 else 4  # a batch without ids
        sizes, samples, inverse = [BATCH] * len(KEYS), BATCH, None
        if scenario.batches == "absent" and (step == 9 or (step % 4 == 1 and rank == 0)):
            sizes, samples = [0] * len(KEYS), 0
        if scenario.batches == "variable":
            sizes, inverse = draw_sizes(generator)
        lengths = [torch.randint(0, longest, (size,), generator=generator) for size in sizes]
        ids = [torch.randint(0, IDS, (int(n.sum()),), generator=generator) for n in lengths]
        weights = torch.rand(sum(i.numel() for i in ids), generator=generator) + 0.5
        return cls(lengths, ids, weights, inverse, torch.randn(samples, generator=generator))


def _probe(
    model: nn.Module, table_ids: torch.Tensor, scenario: Scenario, device: torch.device
) -> dict[str, torch.Tensor]:
    """Reads the row of every id through the model, in bags of one id, without training.

    Returns:
        For each table, ``[IDS, dim]``.
    """
    ones = torch.ones(IDS, dtype=torch.int64)
    weights = torch.ones(4 * IDS) if scenario.pooling == "weighted" else None
    ids = [table_ids, table_ids, table_ids, torch.arange(IDS)]
    # TorchRec does not support alternating between equal and variable batch sizes.
    inverse = torch.arange(IDS).expand(4, IDS) if scenario.batches == "variable" else None
    outputs = model.module.ebc(_features(ids, [ones] * 4, weights, device, inverse)).wait()
    by_key = outputs.to_dict()
    return {
        "t0": by_key["f0"].detach().cpu().float(),
        "t1": by_key["f2"].detach().cpu().float(),
        "s": by_key["g"].detach().cpu().float(),
    }


def _copy_rows(model: DistributedModelParallel, rows: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    for name, table in rows.items():
        for shard in state[f"ebc.embedding_bags.{name}.weight"].local_shards():
            (first, column), (count, dim) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(table[first : first + count, column : column + dim])


def train_with_stock(
    rank: int, world_size: int, device: torch.device, scenario: Scenario
) -> Outcome:
    """Trains both models. Runs on every rank."""
    torch.manual_seed(11)
    stock = _shard(scenario, IDS, "fused", world_size, device)
    backend_model = _shard(scenario, CAPACITY, scenario.backend, world_size, device)
    mapped = torch.arange(IDS) if scenario.narrow else raw_ids()
    # Reads through a separate model, because stock tables count each lookup as an optimizer step.
    twin = _shard(scenario, CAPACITY, scenario.backend, world_size, device)
    initial = _probe(twin, mapped, scenario, device)
    _copy_rows(stock, initial)
    _copy_rows(backend_model, {"s": initial["s"]})
    generator = torch.Generator().manual_seed(100 + rank)
    vectors = torch.Generator().manual_seed(17)
    projection = torch.randn(8 * 2 + 12 * 2 + 4, generator=vectors).to(device)
    losses = []
    for step in range(scenario.steps):
        batch = _Batch.draw(scenario, rank, step, generator)
        ids = batch.ids
        used_weights = batch.weights if scenario.pooling == "weighted" else None
        sent_to_ours = [mapped[ids[0]], mapped[ids[1]], mapped[ids[2]], ids[3]]
        if scenario.narrow and rank == 0:
            sent_to_ours = [sent.int() for sent in sent_to_ours]
        step_losses, dtypes = [], []
        for model, sent in ((stock, ids), (backend_model, sent_to_ours)):
            output = model(_features(sent, batch.lengths, used_weights, device, batch.inverse))
            assert output.shape == (batch.target.numel(), projection.numel())
            dtypes.append(output.dtype)
            error = output.float() @ projection - batch.target.to(device)
            loss = error.square().sum() / BATCH
            if scenario.trained:
                loss.backward()
            step_losses.append(float(loss.detach()))
        assert dtypes[0] == dtypes[1]
        if scenario.pooling != "mean":  # TorchRec divides sums over ranks in float32
            assert dtypes[0] == OUTPUTS[scenario.output]
        losses.append(step_losses)
    stock_rows = _probe(stock, torch.arange(IDS), scenario, device)
    our_rows = _probe(backend_model, mapped, scenario, device)
    return Outcome(
        losses=torch.tensor(losses, dtype=torch.float64),
        rows={name: torch.stack([stock_rows[name], our_rows[name]]) for name in stock_rows},
    )
