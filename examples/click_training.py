"""Trains and tests one variant of the model."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from click_batches import ClickBatch, ClickBatches
from click_data import ClickLog
from click_model import Variant, build
from report import Progress
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_hkv.sharding import table_counters

ROW_LEARNING_RATE = 0.05
DENSE_LEARNING_RATE = 1e-3
# Batches between two refreshes of the progress line, which sums counters over the ranks.
REFRESH = 8
# The progress line's loss and AUC are of so many last batches, each judged before training on it.
WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    batch_size: int
    seed: int
    device: torch.device


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave; counts are over all ranks and, in ``counters``, over all hash tables."""

    variant: Variant
    auc: float
    loss: float
    samples_per_second: float
    rows: dict[str, int]
    counters: dict[str, int]


def run(log: ClickLog, split: int, variant: Variant, settings: Settings) -> Result:
    """Trains on the rows before ``split`` and tests on the others."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.device
    model = build(log, variant, device, settings.seed, ROW_LEARNING_RATE)
    batches = ClickBatches(log, variant, device, rank, world_size)
    steps = settings.epochs * (split // settings.batch_size)
    started = time.perf_counter()
    with Progress(variant.title, steps, settings.batch_size, shown=rank == 0) as progress:
        loss = train(model, training_batches(batches, split, settings), progress)
    seconds = time.perf_counter() - started
    counters = hash_table_counters(model, device)
    test = range(split, len(log))
    return Result(
        variant=variant,
        auc=test_auc(model, batches.in_order(test, settings.batch_size)),
        loss=loss,
        samples_per_second=steps * settings.batch_size / seconds,
        rows={c.name: variant.num_embeddings(c) for c in log.columns},
        counters=counters,
    )


def training_batches(batches: ClickBatches, split: int, settings: Settings) -> Iterable[ClickBatch]:
    for epoch in range(settings.epochs):
        # The same order in every variant.
        seed = settings.seed + 1000 * epoch
        yield from batches.shuffled(range(split), settings.batch_size, seed)


def train(model: nn.Module, batches: Iterable[ClickBatch], progress: Progress) -> float:
    """Returns the mean loss of the last batches."""
    model.train()
    # The rows are not among these: their optimizer runs in the backward.
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = torch.optim.Adam(dense_parameters.values(), lr=DENSE_LEARNING_RATE)
    recent: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=WINDOW)
    loss = float("nan")
    for step, batch in enumerate(batches, start=1):
        logits = model(batch.dense, batch.sparse).squeeze(1)
        dense_optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense_optimizer.step()
        recent.append((logits.detach(), batch.labels))
        if step % REFRESH == 0 or step == progress.steps:
            loss, auc = recent_quality(recent)
            counters = hash_table_counters(model, logits.device)
            progress.update(step, loss, auc, counters)
    return loss


def recent_quality(recent: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Loss and AUC of the last batches of all ranks."""
    logits, labels = (gather(torch.cat(column)) for column in zip(*recent, strict=True))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return loss.item(), auc(logits, labels)


@torch.no_grad()
def test_auc(model: nn.Module, batches: Iterable[ClickBatch]) -> float:
    """AUC of all ranks' predictions."""
    model.eval()
    logits, labels, real = [], [], []
    for batch in batches:
        logits.append(model(batch.dense, batch.sparse).squeeze(1))
        labels.append(batch.labels)
        real.append(batch.real)
    kept = gather(torch.cat(real))
    return auc(gather(torch.cat(logits))[kept], gather(torch.cat(labels))[kept])


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    # In float64, or the metric's running sums of a large set lose digits.
    return binary_auroc(logits.double(), labels.long()).item()


def gather(local: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, one after the other; they are equally long."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def hash_table_counters(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Sums over tables and ranks; empty without hash tables."""
    tables = table_counters(model)
    names = sorted({name for counters in tables.values() for name in counters})
    if not names:
        return {}
    sums = [sum(counters[name] for counters in tables.values()) for name in names]
    total = torch.tensor(sums, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
