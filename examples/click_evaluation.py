"""Training with evaluations in between.

It uses ``torchrec_hkv.integrations.hybridbackend.train_and_evaluate``.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from click_batches import ClickBatch
from torch import nn
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
)

from torchrec_hkv.integrations.hybridbackend import Evaluation, train_and_evaluate

TASK = RecTaskInfo(
    name="click", label_name="label", prediction_name="prediction", weight_name="weight"
)


class EvaluatedModel(nn.Module):
    """Adds a loss to a model of logits, for TorchRec's pipelines and metrics.

    Args:
        model: the sharded model; called with dense and sparse features.
        recent: gets logits and labels of each training batch.
    """

    def __init__(self, model: nn.Module, recent: deque[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.recent = recent

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the mean loss of the rows that are not padding, and the inputs of the metrics."""
        logits = self.model(batch.dense, batch.sparse).squeeze(1)
        weight = batch.real.to(logits)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, weight, reduction="sum"
        ) / weight.sum().clamp_min(1)
        if self.training:
            self.recent.append((logits.detach(), batch.labels))
        return loss, {
            "prediction": torch.sigmoid(logits.detach().double()),
            "label": batch.labels.double(),
            "weight": weight.double(),
        }


def make_metrics(batch_size: int, rows: int, device: torch.device) -> RecMetricModule:
    """Creates metrics for one evaluation, on every rank: normalized entropy and AUC.

    Args:
        batch_size: batch size of a rank.
        rows: number of rows of the evaluation, over all ranks.
        device: device of the batches.
    """
    ranks = dist.get_world_size()
    # The window must also have room for the padding of the last batch.
    definition = RecMetricDef(rec_tasks=[TASK], window_size=rows + ranks * batch_size)
    config = MetricsConfig(
        rec_tasks=[TASK],
        rec_metrics={RecMetricEnum.NE: definition, RecMetricEnum.AUC: definition},
        compute_on_all_ranks=True,
    )
    return generate_metric_module(
        RecMetricModule,
        metrics_config=config,
        batch_size=batch_size,
        world_size=ranks,
        my_rank=dist.get_rank(),
        state_metrics_mapping={},
        device=device,
        process_group=dist.group.WORLD,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The figures of one evaluation.

    Attributes:
        step: number of training steps before the evaluation.
        loss: mean over batches and ranks.
        normalized_entropy: loss divided by the loss of always predicting the mean.
        auc: AUC of all evaluated rows.
    """

    step: int
    loss: float
    normalized_entropy: float
    auc: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> EvaluationResult:
        """Reads the figures from TorchRec's metrics."""
        by_kind = {
            name.partition("-")[0]: value
            for name, value in evaluation.metrics.items()
            if "window" in name
        }
        return cls(evaluation.step, evaluation.loss, by_kind["ne"], by_kind["auc"])


def train_with_evaluations(
    judged: EvaluatedModel,
    optimizer: torch.optim.Optimizer,
    train: Iterable[ClickBatch],
    test: Callable[[], Iterator[ClickBatch]],
    every: int,
    metrics: Callable[[], RecMetricModule],
    device: torch.device,
) -> tuple[list[EvaluationResult], float]:
    """Trains, and evaluates every ``every`` steps and after the last.

    Args:
        judged: the model.
        optimizer: the optimizer of the dense parameters.
        train: training batches of this rank.
        test: returns the batches of an evaluation.
        every: number of steps between evaluations.
        metrics: creates the metrics of an evaluation.
        device: device of the batches.

    Returns:
        The judgements, and the seconds that the evaluations took.
    """
    began, seconds = 0.0, 0.0

    def begin() -> Iterator[ClickBatch]:
        nonlocal began
        began = time.perf_counter()
        return test()

    def end(_: Any) -> None:
        nonlocal seconds
        seconds += time.perf_counter() - began

    evaluations = train_and_evaluate(
        judged, optimizer, train, begin, every, metrics=metrics, device=device, on_evaluation=end
    )
    return [EvaluationResult.of(evaluation) for evaluation in evaluations], seconds
