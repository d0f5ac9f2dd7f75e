"""TorchRec's train pipelines train models with evicting tables like a plain loop."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)

from tests.support.pipelines import evicted, make_pipeline_model, pipeline_batch

pytestmark = pytest.mark.compat

STEPS = 14


def _optimizer(model):
    return torch.optim.SGD(model.module.over.parameters(), lr=0.01)


def _plain(model, rank, device):
    """Losses and predictions of a plain loop."""
    optimizer = _optimizer(model)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, prediction = model(pipeline_batch(rank, step, device))
        loss.backward()
        optimizer.step()
        seen.append(prediction)
    return torch.stack(seen)


def _check(model, plain, rank, device, seen):
    expected = _plain(plain, rank, device)
    torch.testing.assert_close(torch.stack(seen), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(expected[0], expected[-1])
    assert evicted(model) == evicted(plain)
    return evicted(model)


def _run(rank, world_size, device, sharding_type, make):
    plain, piped = (make_pipeline_model(world_size, device, sharding_type) for _ in range(2))
    pipeline = make(model=piped, optimizer=_optimizer(piped), device=device)
    batches = iter([pipeline_batch(rank, step, device) for step in range(STEPS)])
    seen = [pipeline.progress(batches) for _ in range(STEPS)]
    return _check(piped, plain, rank, device, seen)


def _semi_sync(**kwargs):
    # ``start_batch`` exceeds the number of batches; before it, this pipeline works like the others.
    return TrainPipelineSemiSync(**kwargs, start_batch=STEPS + 1)


PIPELINES = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "lite": TrainPipelineSparseDistLite,
    "fused": TrainPipelineFusedSparseDist,
    "semi": _semi_sync,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


#: Pipelines that need a GPU.
ON_STREAMS = ("fused", "semi", "prefetch")


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_as_a_loop(run_ranks, device_type, pipeline, sharding_type):
    if device_type == "cpu" and pipeline in ON_STREAMS:
        pytest.skip("TorchRec runs this pipeline on CUDA streams only")
    results = run_ranks(2, _run, sharding_type, PIPELINES[pipeline])
    for table in ("t", "q"):
        assert sum(counts.get(table, 0) for counts in results) > 100


def _staged(rank, world_size, device, with_prefetch):
    plain, piped = (make_pipeline_model(world_size, device, "row_wise") for _ in range(2))
    data_dist, prefetch = torch.cuda.Stream(), torch.cuda.Stream()
    util = SparseDataDistUtil(
        model=piped,
        data_dist_stream=data_dist,
        prefetch_stream=prefetch if with_prefetch else None,
    )
    stages = [
        PipelineStage(
            name="copy",
            runnable=lambda batch, *_: batch.to(device, non_blocking=True),
            stream=torch.cuda.Stream(),
        ),
        PipelineStage(
            name="input distribution",
            runnable=util.start_sparse_data_dist,
            stream=data_dist,
            fill_callback=util.wait_sdd_fill_callback,
        ),
    ]
    if with_prefetch:
        stages.append(
            PipelineStage(
                name="prefetch",
                runnable=util.prefetch,
                stream=prefetch,
                fill_callback=util.load_prefetch,
            )
        )
    pipeline = StagedTrainPipeline(stages)
    batches = iter([pipeline_batch(rank, step, torch.device("cpu")) for step in range(STEPS)])
    optimizer = _optimizer(piped)
    seen = []
    while (batch := pipeline.progress(batches)) is not None:
        optimizer.zero_grad()
        loss, prediction = piped(batch)
        loss.backward()
        optimizer.step()
        seen.append(prediction)
    return _check(piped, plain, rank, device, seen)


@pytest.mark.parametrize("with_prefetch", [False, True])
def test_staged(run_ranks, device_type, with_prefetch):
    if device_type == "cpu":
        pytest.skip("TorchRec runs this pipeline on CUDA streams only")
    results = run_ranks(1, _staged, with_prefetch)
    assert results[0]["t"] > 100


def _half_a_step_ahead(rank, world_size, device, sharding_type):
    plain, piped = (make_pipeline_model(world_size, device, sharding_type) for _ in range(2))
    # The pipeline looks a batch up before the previous batch's backward. The plain model does the
    # same, and the layers above must not change in between.
    frozen = torch.optim.SGD(piped.module.over.parameters(), lr=0.0)
    pipeline = TrainPipelineSemiSync(piped, frozen, device, start_batch=0)
    batches = iter([pipeline_batch(rank, step, device) for step in range(STEPS)])
    seen = [pipeline.progress(batches) for _ in range(STEPS)]
    expected = []
    ahead = plain(pipeline_batch(rank, 0, device))
    for step in range(STEPS):
        loss, prediction = ahead
        if step + 1 < STEPS:
            ahead = plain(pipeline_batch(rank, step + 1, device))
        loss.backward()
        expected.append(prediction)
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert evicted(piped) == evicted(plain)
    return evicted(piped)


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_semi_synchronous(run_ranks, device_type, sharding_type):
    if device_type == "cpu":
        pytest.skip("TorchRec runs this pipeline on CUDA streams only")
    results = run_ranks(2, _half_a_step_ahead, sharding_type)
    for table in ("t", "q"):
        assert sum(counts.get(table, 0) for counts in results) > 100
