"""Trains and tests one variant of the model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from click_batches import ClickBatch, ClickBatches, Rows
from click_data import ClickLog
from click_evaluation import EvaluatedModel, EvaluationResult, make_metrics, train_with_evaluations
from click_model import Variant, build
from saves import Saves, epochs_done
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_hkv.metrics import ConsoleLine, TensorBoard, Watch
from torchrec_hkv.sharding import table_counters

ROW_LEARNING_RATE = 0.05
DENSE_LEARNING_RATE = 1e-3
# Share of the rows, in order of time, for training; the others are the test.
TRAIN_SHARE = 0.8
# Number of batches between refreshes of the progress line, which sums metrics over the ranks.
REFRESH = 8
# Number of last batches in the progress line's loss and AUC, each predicted before training on it.
WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    batch_size: int
    seed: int
    device: torch.device
    tensorboard: Path | None = None
    save: Path | None = None
    resume: Path | None = None
    architecture: str = "dlrm"
    #: Steps between evaluations on the test. None: one evaluation at the end, without TorchRec's
    #: metrics.
    evaluate_every: int | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace, device: torch.device, **more: Any) -> Settings:
        """Creates settings from the arguments common to all click models, and further settings."""
        return cls(
            epochs=arguments.epochs,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            device=device,
            tensorboard=arguments.tensorboard,
            save=arguments.save,
            resume=arguments.resume,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """The quality of the last training batches, each predicted before training on it."""

    step: int
    loss: float
    auc: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run. Counts are sums over all ranks; ``counters`` also over hash tables."""

    variant: Variant
    auc: float
    loss: float
    samples_per_second: float
    rows: dict[str, int]
    counters: dict[str, int]
    judgements: Sequence[EvaluationResult] = ()
    progress: Sequence[Progress] = ()


def run(log: ClickLog, split: int, variant: Variant, settings: Settings) -> Result:
    """Trains on the rows before ``split`` and tests on the others.

    Raises:
        DataError: the checkpoint to resume from does not fit.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.device
    model = build(log, variant, device, settings.seed, ROW_LEARNING_RATE, settings.architecture)
    batches = ClickBatches(log, variant, device, rank, world_size)
    optimizer = make_dense_optimizer(model)
    saves = Saves(model, optimizer, variant.key, settings.save, settings.resume)
    done = epochs_done(saves, settings.epochs, settings.resume)
    steps = (settings.epochs - done) * (split // settings.batch_size)
    started = time.perf_counter()
    folder = settings.tensorboard / variant.key if settings.tensorboard and rank == 0 else None
    test = range(split, len(log))
    judgements: list[EvaluationResult] = []
    judging = 0.0
    with Reporter(model, variant, steps, folder) as reporter:
        training = training_batches(batches, range(split), settings, done, saves)
        if settings.evaluate_every is None:
            loss = train(model, training, reporter, optimizer)
        else:
            loss, judgements, judging = train_and_judge(
                model, training, batches, test, settings, reporter, optimizer
            )
        seconds = time.perf_counter() - started - judging
        counters = hash_table_counters(model, device)
        auc_on_test = test_auc(model, batches.in_order(test, settings.batch_size))
        reporter.tested(auc_on_test)
    return Result(
        variant=variant,
        auc=auc_on_test,
        loss=loss,
        samples_per_second=steps * settings.batch_size / seconds,
        rows={c.name: variant.num_embeddings(c) for c in log.columns},
        counters=counters,
        judgements=judgements,
        progress=reporter.progress,
    )


def training_batches(
    batches: ClickBatches,
    rows: Rows,
    settings: Settings,
    first: int = 0,
    saves: Saves | None = None,
) -> Iterable[ClickBatch]:
    """Yields batches of the epochs from ``first`` on, in the same order for every variant.

    Saves after each epoch, once the last batch is trained, which is when the next is requested.
    """
    for epoch in range(first, settings.epochs):
        seed = settings.seed + 1000 * epoch
        yield from batches.shuffled(rows, settings.batch_size, seed)
        if saves is not None:
            saves.save(epoch + 1)


class Reporter:
    """Shows the progress of a run on the console and, if a folder is given, in TensorBoard."""

    def __init__(self, model: nn.Module, variant: Variant, steps: int, folder: Path | None) -> None:
        self.steps = steps
        self.line = ConsoleLine(variant.title, steps, shown=dist.get_rank() == 0)
        self.board = None if folder is None else TensorBoard(folder)
        sinks = [self.line] if self.board is None else [self.line, self.board]
        self.watch = None
        if variant.kernel == "hkv":
            self.watch = Watch(model, REFRESH, sinks, dist.group.WORLD)
        self.samples = 0
        self.progress: list[Progress] = []

    def __enter__(self) -> Reporter:
        with contextlib.ExitStack() as stack:
            for part in (self.line, self.board, self.watch):
                if part is not None:
                    stack.enter_context(part)
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.__exit__(*error)

    def step(self, samples: int) -> None:
        """Counts a step and its samples, over all ranks."""
        self.samples += samples
        if self.watch is not None:
            self.watch.step()

    def quality(self, step: int, loss: float, auc: float) -> None:
        """Shows loss and AUC of the last training batches."""
        self.progress.append(Progress(step, loss, auc))
        self.line.update(step, self.samples, **{"train loss": loss, "train AUC": auc})
        if self.board is not None:
            self.board.scalars(step, **{"train/loss": loss, "train/AUC": auc})

    def tested(self, auc: float) -> None:
        """Shows the test AUC, after the last step."""
        self.line.update(self.steps, **{"test AUC": auc})
        if self.board is not None:
            self.board.scalars(self.steps, **{"test/AUC": auc})


def train(
    model: nn.Module,
    batches: Iterable[ClickBatch],
    reporter: Reporter,
    dense_optimizer: KeyedOptimizerWrapper,
) -> float:
    """Returns the mean loss of the last batches."""
    model.train()
    recent: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=WINDOW)
    loss = float("nan")
    for step, batch in enumerate(batches, start=1):
        logits = model(batch.dense, batch.sparse).squeeze(1)
        dense_optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense_optimizer.step()
        recent.append((logits.detach(), batch.labels))
        reporter.step(len(batch.labels) * dist.get_world_size())
        if step % REFRESH == 0 or step == reporter.steps:
            loss, auc = recent_quality(recent)
            reporter.quality(step, loss, auc)
    return loss


def make_dense_optimizer(
    model: nn.Module, learning_rate: float = DENSE_LEARNING_RATE
) -> KeyedOptimizerWrapper:
    """Creates the optimizer of all parameters but the rows, whose optimizer runs in the backward.

    With a learning rate of 0, only tables train.
    """
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(
        dense_parameters, lambda parameters: torch.optim.Adam(parameters, lr=learning_rate)
    )


def train_and_judge(
    model: nn.Module,
    training: Iterable[ClickBatch],
    batches: ClickBatches,
    test: range,
    settings: Settings,
    reporter: Reporter,
    dense_optimizer: KeyedOptimizerWrapper,
) -> tuple[float, list[EvaluationResult], float]:
    """Trains with the same steps as :func:`train`, and evaluations in between.

    Returns:
        The mean loss of the last training batches, the judgements, and the seconds that they took.
    """
    ranks = dist.get_world_size()
    recent: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=WINDOW)
    loss = float("nan")

    def reported() -> Iterator[ClickBatch]:
        nonlocal loss
        for step, batch in enumerate(training, start=1):
            yield batch
            # A batch has been trained when the next one is requested.
            reporter.step(len(batch.labels) * ranks)
            if step % REFRESH == 0 or step == reporter.steps:
                loss, auc = recent_quality(recent)
                reporter.quality(step, loss, auc)

    judgements, seconds = train_with_evaluations(
        EvaluatedModel(model, recent),
        dense_optimizer,
        reported(),
        lambda: batches.in_order(test, settings.batch_size),
        settings.evaluate_every,
        lambda: make_metrics(settings.batch_size // ranks, len(test), settings.device),
        settings.device,
    )
    return loss, judgements, seconds


def recent_quality(recent: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Computes loss and AUC of the last batches of all ranks."""
    logits, labels = (gather(torch.cat(column)) for column in zip(*recent, strict=True))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return loss.item(), auc(logits, labels)


@torch.no_grad()
def test_auc(model: nn.Module, batches: Iterable[ClickBatch]) -> float:
    """Computes the AUC of all ranks' predictions."""
    model.eval()
    logits, labels, real = [], [], []
    for batch in batches:
        logits.append(model(batch.dense, batch.sparse).squeeze(1))
        labels.append(batch.labels)
        real.append(batch.real)
    is_real = gather(torch.cat(real))
    return auc(gather(torch.cat(logits))[is_real], gather(torch.cat(labels))[is_real])


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    # In float64, because the metric's running sums of a large set lose digits otherwise.
    return binary_auroc(logits.double(), labels.long()).item()


def gather(local: torch.Tensor) -> torch.Tensor:
    """Concatenates the tensors of all ranks, which have equal lengths."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def hash_table_counters(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Sums counters over tables and ranks; empty without hash tables."""
    tables = table_counters(model)
    names = sorted({name for counters in tables.values() for name in counters})
    if not names:
        return {}
    sums = [sum(counters[name] for counters in tables.values()) for name in names]
    total = torch.tensor(sums, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
