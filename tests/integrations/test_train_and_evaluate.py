"""Intermediate evaluations do not change training, and give the metrics of all samples."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.integrations.hybridbackend import train_and_evaluate
from torchrec_hkv.sharding import table_counters

pytestmark = pytest.mark.compat

BATCH, STEPS, IDS = 32, 7, 60
TASK = RecTaskInfo(
    name="click", label_name="label", prediction_name="prediction", weight_name="weight"
)


@dataclasses.dataclass
class Clicks(Pipelineable):
    """A batch."""

    features: KeyedJaggedTensor
    labels: torch.Tensor

    @classmethod
    def draw(cls, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(IDS, (2 * BATCH,), generator=generator)
        features = KeyedJaggedTensor(["f", "g"], ids, lengths=torch.ones(2 * BATCH).long())
        noise = torch.rand(BATCH, generator=generator)
        return cls(features, ((ids[:BATCH] % 7) / 7 + noise > 1).float())

    def to(self, device, non_blocking=False):
        return Clicks(self.features.to(device), self.labels.to(device))

    def record_stream(self, stream):
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self):
        return Clicks(self.features.pin_memory(), self.labels.pin_memory())


class Model(nn.Module):
    """Returns loss and outputs, as TorchRec's pipelines require."""

    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=4 * IDS, embedding_dim=8, feature_names=[feature]
            )
            for name, feature in (("t", "f"), ("s", "g"))
        ]
        self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {"lr": 0.5})
        self.over = nn.Linear(16, 1)

    def forward(self, batch):
        logits = self.over(self.ebc(batch.features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        outputs = {
            "prediction": torch.sigmoid(logits.detach()),
            "label": batch.labels,
            "weight": torch.ones_like(batch.labels),
        }
        return loss, outputs


def _model(world_size, device):
    torch.manual_seed(5)
    constraints = {
        "t": ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"]),
        "s": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    model = shard_model(Model(), constraints, world_size, device)
    state = torch.Generator().manual_seed(3)
    for shard in model.state_dict()["ebc.embedding_bags.s.weight"].local_shards():
        shard.tensor.copy_(torch.rand(shard.tensor.shape, generator=state) - 0.5)
    parameters = [p for n, p in model.named_parameters() if "over" in n]
    return model, torch.optim.SGD(parameters, lr=0.1)


def _train_batches(rank):
    return [Clicks.draw(100 * rank + step) for step in range(STEPS)]


def _test_batches(rank):
    # Rank 1 has one batch fewer: an evaluation ends with the first rank that runs out.
    return [Clicks.draw(9000 + 100 * rank + step) for step in range(4 - rank)]


def _metrics(rank, world_size, device):
    config = MetricsConfig(
        rec_tasks=[TASK],
        rec_metrics={
            RecMetricEnum.NE: RecMetricDef(rec_tasks=[TASK], window_size=10**6),
            RecMetricEnum.AUC: RecMetricDef(rec_tasks=[TASK], window_size=10**6),
        },
        compute_on_all_ranks=True,
    )
    return generate_metric_module(
        RecMetricModule,
        metrics_config=config,
        batch_size=BATCH,
        world_size=world_size,
        my_rank=rank,
        state_metrics_mapping={},
        device=device,
        process_group=dist.group.WORLD,
    )


def _run(rank, world_size, device, every, has_pipeline):
    model, optimizer = _model(world_size, device)
    pipeline = TrainPipelineSparseDist(model, optimizer, device) if has_pipeline else None
    seen = []
    evaluations = train_and_evaluate(
        model,
        optimizer,
        _train_batches(rank),
        lambda: _test_batches(rank),
        every,
        metrics=lambda: _metrics(rank, world_size, device),
        device=device,
        pipeline=pipeline,
        on_evaluation=seen.append,
    )
    assert seen == evaluations
    assert model.training
    return evaluations, table_counters(model)


def _by_hand(rank, world_size, device, every):
    """Loss and AUC of the test samples of all ranks, after every ``every`` steps."""
    model, optimizer = _model(world_size, device)
    found = []
    for step, batch in enumerate(_train_batches(rank), start=1):
        optimizer.zero_grad()
        loss, _ = model(batch.to(device))
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == STEPS:
            model.eval()
            with torch.no_grad():
                made = [model(test.to(device)) for test in _test_batches(rank)[: 5 - world_size]]
            model.train()
            columns = torch.stack(
                [
                    torch.cat([outputs[name] for _, outputs in made])
                    for name in ("prediction", "label")
                ]
            )
            parts = [torch.empty_like(columns) for _ in range(world_size)]
            dist.all_gather(parts, columns)
            predictions, labels = torch.cat(parts, dim=1)
            loss = nn.functional.binary_cross_entropy(predictions, labels)
            found.append((step, float(loss), float(binary_auroc(predictions, labels.int()))))
    return found, table_counters(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("has_pipeline", [False, True])
@pytest.mark.parametrize("every", [3, 7])
def test_beside_a_loop_by_hand(run_ranks, world_size, has_pipeline, every):
    results = run_ranks(world_size, _run, every, has_pipeline)
    expected = run_ranks(world_size, _by_hand, every)
    for (evaluations, counters), (by_hand, trained_alone) in zip(results, expected, strict=True):
        assert [one.step for one in evaluations] == [step for step, _, _ in by_hand]
        for evaluation, (_, loss, auc) in zip(evaluations, by_hand, strict=True):
            assert evaluation.batches == 5 - world_size
            assert evaluation.loss == pytest.approx(loss, rel=1e-4)
            (name,) = [name for name in evaluation.metrics if "window_auc" in name]
            # TorchRec's AUC depends on the order of equal predictions: a pair of them makes 1e-4.
            assert evaluation.metrics[name] == pytest.approx(auc, abs=5e-4)
            assert any("ne-click" in name for name in evaluation.metrics)
        assert counters == trained_alone


def _refused(rank, world_size, device, every, max_steps, tests):
    model, optimizer = _model(world_size, device)
    with pytest.raises(ValueError, match=r"every_n_steps|max_steps|evaluation") as refusal:
        train_and_evaluate(
            model,
            optimizer,
            _train_batches(rank),
            lambda: tests,
            every,
            metrics=lambda: _metrics(rank, world_size, device),
            device=device,
            max_steps=max_steps,
        )
    return str(refusal.value)


@pytest.mark.parametrize(
    ("every", "max_steps", "message"),
    [
        (0, None, "every_n_steps is 0"),
        (None, None, "every_n_steps is None"),
        (1.5, None, "every_n_steps is 1.5"),
        (1, True, "max_steps is True"),
        (1, 0, "max_steps is 0"),
        (2, None, "after step 2 has no batch"),
    ],
)
def test_refused(run_ranks, every, max_steps, message):
    (said,) = run_ranks(1, _refused, every, max_steps, [])
    assert message in said


class _Exhausted(nn.Module):
    """A model whose own iterator is exhausted."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.noise = iter([1.0, 2.0])

    def forward(self, batch):
        return self.weight.sum() * next(self.noise), {}


@pytest.mark.parametrize("with_pipeline", [False, True])
def test_a_step_that_stops_an_iteration_of_its_own_is_no_end_of_training(with_pipeline):
    model = _Exhausted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu")) if with_pipeline else None
    with pytest.raises(RuntimeError, match=r"Training step 3 raised StopIteration although there"):
        train_and_evaluate(
            model,
            optimizer,
            [Clicks.draw(seed) for seed in range(9)],
            list,
            100,
            metrics=lambda: None,
            device=torch.device("cpu"),
            pipeline=pipeline,
        )


def _short(rank, world_size, device):
    model, optimizer = _model(world_size, device)
    return [
        one.step
        for one in train_and_evaluate(
            model,
            optimizer,
            _train_batches(rank),
            lambda: _test_batches(rank),
            2,
            metrics=lambda: _metrics(rank, world_size, device),
            device=device,
            max_steps=5,
        )
    ]


def test_it_ends_with_max_steps(run_ranks):
    assert run_ranks(1, _short) == [[2, 4, 5]]
