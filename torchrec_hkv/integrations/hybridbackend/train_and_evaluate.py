"""Trains a sharded model with periodic evaluations, using TorchRec's metrics.

The counterpart of HybridBackend's ``train_and_evaluate``. The sharded model is evaluated on all
ranks. Evaluation lookups on backends insert no ids and change no scores.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.metrics.metric_module import RecMetricModule


class _Batch(Protocol):
    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


Batch = TypeVar("Batch", bound=_Batch)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        step: number of training steps before the evaluation.
        batches: number of evaluated batches on this rank.
        loss: mean loss over the batches of all ranks.
        metrics: metrics by TorchRec's names, such as ``auc-task|window_auc``; equal on all ranks.
    """

    step: int
    batches: int
    loss: float
    metrics: dict[str, float]


def train_and_evaluate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    train: Iterable[Batch],
    evaluate: Callable[[], Iterable[Batch]],
    every_n_steps: int,
    *,
    metrics: Callable[[], RecMetricModule],
    device: torch.device,
    pipeline: Any | None = None,
    max_steps: int | None = None,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> list[Evaluation]:
    """Trains a model, and evaluates it every ``every_n_steps`` steps and after the last step.

    Args:
        model: a model, sharded or not. Called with a batch, it returns the loss, a scalar tensor,
            and a dictionary of tensors with the names of predictions, labels and weights in the
            metrics' tasks (``RecTaskInfo``).
        optimizer: optimizer of the parameters that are not updated in backward; None for none.
        train: batches of this rank. All ranks must have the same number.
        evaluate: returns the batches of one evaluation. The evaluation ends on all ranks when one
            rank has no more batches.
        every_n_steps: number of training steps between evaluations, at least 1.
        metrics: creates the metrics of one evaluation with ``generate_metric_module``, with
            ``compute_on_all_ranks=True`` if ranks other than 0 need them.
        device: device that batches are moved to.
        pipeline: a TorchRec pipeline whose ``progress`` makes the training steps, such as
            ``TrainPipelineSparseDist(model, optimizer, device)``. It keeps prefetched batches
            during evaluations. None: this function makes the steps one after the other.
        max_steps: maximal number of training steps; None to train on all batches.
        on_evaluation: called on every rank after each evaluation.

    Returns:
        The evaluations, in order.

    Raises:
        ValueError: ``every_n_steps`` or ``max_steps`` is not a positive integer, or an evaluation
            has no batches.
        RuntimeError: a training step raised ``StopIteration`` although there were more batches.
    """
    _check_steps("every_n_steps", every_n_steps)
    if max_steps is not None:
        _check_steps("max_steps", max_steps)
    batches, step = _Batches(train), 0
    evaluations: list[Evaluation] = []

    def judge() -> None:
        # Detaching restores the forwards of sharded modules; the pipeline's next step attaches
        # again.
        if hasattr(pipeline, "detach"):
            pipeline.detach()
        evaluations.append(_evaluated(model, evaluate(), metrics(), device, step))
        on_evaluation(evaluations[-1])

    model.train()
    while max_steps is None or step < max_steps:
        try:
            _train_step(model, optimizer, batches, device, pipeline)
        except StopIteration as error:
            if not batches.ended:  # raised by the model, for example by an exhausted iterator
                raise RuntimeError(
                    f"Training step {step + 1} raised StopIteration although there are more "
                    "batches: check the iterators in the model, the optimizer and the pipeline."
                ) from error
            break
        step += 1
        if step % every_n_steps == 0:
            judge()
    if step % every_n_steps != 0:
        judge()
    return evaluations


def _check_steps(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, but must be a number of steps, at least 1.")


class _Batches(Iterator[Batch]):
    """An iterator that records whether it is exhausted."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self.ended = False

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            self.ended = True
            raise


def _train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterator[Batch],
    device: torch.device,
    pipeline: Any | None,
) -> None:
    if pipeline is not None:
        pipeline.progress(batches)
        return
    batch = next(batches).to(device, non_blocking=True)
    if optimizer is not None:
        optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    if optimizer is not None:
        optimizer.step()


def _evaluated(
    model: nn.Module,
    batches: Iterable[Batch],
    metrics: RecMetricModule,
    device: torch.device,
    step: int,
) -> Evaluation:
    metrics = metrics.to(device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    count = 0
    with _in_eval_mode(model), torch.no_grad():
        for batch in _while_all_have(batches, device):
            loss, outputs = model(batch.to(device, non_blocking=True))
            metrics.update(outputs)
            total += torch.stack([loss.detach().double(), torch.ones_like(total[0])])
            count += 1
    if count == 0:
        raise ValueError(
            f"The evaluation after step {step} has no batch on some rank, but needs one on each."
        )
    if dist.is_initialized():
        dist.all_reduce(total)
    computed = metrics.compute()
    return Evaluation(
        step=step,
        batches=count,
        loss=float(total[0] / total[1]),
        metrics={name: float(value) for name, value in computed.items()},
    )


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Sharded modules hide their lookups from modules(); only train() reaches them.
        model.train(was_training[0][1])
        for module, training in was_training:
            module.training = training


def _while_all_have(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields batches until a rank has no more."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        has = torch.tensor([batch is not None], dtype=torch.int32, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(has, op=dist.ReduceOp.MIN)
        if batch is None or not int(has):
            return
        yield batch
