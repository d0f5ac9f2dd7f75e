"""The click model of the quality benchmark: TorchRec's DLRM over stock or Tensor-Train tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.quality_data import Ratings, auc
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.tensor_train import IdOrder, smoothed_means

DIM = 16
BATCH = 1024
#: The columns whose tables are compressed.
COMPRESSED = ("user", "movie")
_ROW_BYTES = 4 * DIM
#: Bytes of a hot row with its id in int64.
_HOT_ROW_BYTES = _ROW_BYTES + 8
_POPULATE_EVERY = 40
_DENSE_RATE, _STOCK_RATE = 1e-3, 0.05


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of Tensor-Train tables.

    Attributes:
        name: name of the variant in the CSV file.
        order: order of the ids by the training rows: ``"frequency"``, ``"label"`` (the mean label),
            or None for the order of the raw ids.
        order_share: share of the bytes for an order, which lists as many ids as fit. None: an order
            of all ids, which is part of a vocabulary and is not counted.
        hot_share: share of the bytes for hot rows.
        hot_columns: the columns that have hot rows.
    """

    name: str
    order: str | None = None
    order_share: float | None = None
    hot_share: float = 0.0
    hot_columns: tuple[str, ...] = COMPRESSED


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hyperparameters that validation chooses, besides epochs.

    Attributes:
        learning_rate: learning rate of the tables' optimizer.
        cores: number of cores of the compressed tables; 0 for stock tables.
    """

    learning_rate: float
    cores: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Scores of the test rows after an epoch, and their AUC."""

    scores: Tensor
    auc: float


def options_of(
    log: Ratings, column: str, variant: Variant, ratio: float, cores: int, seed: int = 0
) -> TTOptions:
    """Returns options in which hot rows and the order get their shares of the bytes, and cores the
    rest."""
    budget = _budget(log, column, ratio)
    share = variant.hot_share if column in variant.hot_columns else 0.0
    hot = int(share * budget / _HOT_ROW_BYTES)
    order = order_of(log, column, variant, ratio)
    return TTOptions(
        max_bytes=budget - hot * _HOT_ROW_BYTES - _counted_bytes(order, variant),
        num_cores=cores,
        seed=seed,
        cache_size=hot,
        cache_counted_ids=max(4 * hot, 1024) if hot else None,
        cache_populate_every=_POPULATE_EVERY if hot else None,
    )


def bytes_of(log: Ratings, variant: Variant | None, ratio: float, choice: Choice) -> int:
    """Returns the bytes of the tables of users and movies: rows, cores, hot rows with their ids,
    and orders that list some ids. Optimizer states and counts of frequencies are not included."""
    if variant is None:
        return sum(log.sizes[column] * _ROW_BYTES for column in COMPRESSED)
    count = 0
    for column in COMPRESSED:
        options = options_of(log, column, variant, ratio, choice.cores)
        count += 4 * options.shape(log.sizes[column], DIM).num_elements
        count += options.cache_size * _HOT_ROW_BYTES
        count += _counted_bytes(order_of(log, column, variant, ratio), variant)
    return count


def order_of(log: Ratings, column: str, variant: Variant, ratio: float) -> IdOrder | None:
    """Returns the order of a column's ids, computed from the training rows; None for the order of
    the raw ids."""
    if variant.order is None:
        return None
    means, counts = smoothed_means(
        log.ids[column][: log.train], log.labels[: log.train], log.sizes[column]
    )
    share = variant.order_share
    maximum = None if share is None else int(share * _budget(log, column, ratio))
    return IdOrder.by_value(means if variant.order == "label" else counts, maximum)


def ordered_ids(log: Ratings, variant: Variant | None, ratio: float = 1.0) -> dict[str, Tensor]:
    """Returns the ids for the tables, in the variant's order."""
    ids = dict(log.ids)
    for column in () if variant is None else COMPRESSED:
        order = order_of(log, column, variant, ratio)
        ids[column] = ids[column] if order is None else order.rows_of(ids[column])
    return ids


def _budget(log: Ratings, column: str, ratio: float) -> int:
    return int(log.sizes[column] * _ROW_BYTES / ratio)


def _counted_bytes(order: IdOrder | None, variant: Variant) -> int:
    return 0 if order is None or variant.order_share is None else order.num_bytes


def train(
    log: Ratings,
    variant: Variant | None,
    ratio: float,
    choice: Choice,
    seed: int,
    epochs: int,
) -> list[Outcome]:
    """Trains a model and tests it after every epoch.

    Args:
        log: training and test rows.
        variant: variant of the compressed tables; None for stock tables.
        ratio: dense bytes divided by the compressed tables' bytes.
        choice: learning rate and number of cores.
        seed: seed of the model, its tables and the order of rows.
        epochs: number of epochs.
    """
    model = _sharded(log, variant, ratio, choice, seed)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=_DENSE_RATE)
    ids = ordered_ids(log, variant, ratio)
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(epochs):
        model.train()
        order = torch.randperm(log.train, generator=generator)
        for rows in order.split(BATCH):
            if rows.numel() < BATCH:
                break
            logits = model(log.dense[rows], _features(ids, rows)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, log.labels[rows]).backward()
            optimizer.step()
        scores = torch.cat(list(_scores(model, log, ids)))
        outcomes.append(Outcome(scores, auc(scores, log.test_labels.double())))
    return outcomes


@torch.no_grad()
def _scores(model: nn.Module, log: Ratings, ids: dict[str, Tensor]) -> Iterator[Tensor]:
    model.eval()
    for rows in torch.arange(log.train, log.end).split(8 * BATCH):
        yield model(log.dense[rows], _features(ids, rows)).squeeze(1)


def _features(ids: dict[str, Tensor], rows: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.cat([column[rows] for column in ids.values()]),
        lengths=torch.ones(len(ids) * rows.numel(), dtype=torch.int64),
    )


def _sharded(
    log: Ratings, variant: Variant | None, ratio: float, choice: Choice, seed: int
) -> DistributedModelParallel:
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=DIM, feature_names=[name])
        for name, size in log.sizes.items()
    ]
    collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
    stock = {"compute_kernels": ["fused"], "sharding_types": ["table_wise"]}
    constraints = {}
    for name in log.sizes:
        parameters = collection.embedding_bags[name].parameters()
        compressed = variant is not None and name in COMPRESSED
        if compressed:
            # Trains slices of cores, and hot rows.
            apply_optimizer_in_backward(torch.optim.Adam, parameters, {"lr": choice.learning_rate})
            options = options_of(log, name, variant, ratio, choice.cores, seed)
            constraints[name] = ParameterConstraints(
                compute_kernels=["tt"], sharding_types=["table_wise"], options=options
            )
        else:
            rate = _STOCK_RATE if variant is not None else choice.learning_rate
            apply_optimizer_in_backward(RowWiseAdagrad, parameters, {"lr": rate})
            constraints[name] = ParameterConstraints(**stock)
    model = DLRM(collection, log.dense.shape[1], [32, DIM], [64, 32, 1], torch.device("cpu"))
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
