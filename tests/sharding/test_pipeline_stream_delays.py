"""Train pipelines equal a plain loop whichever of their streams is late."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tests.support.pipelines import evicted, make_pipeline_model, pipeline_batch

STEPS = 8
CYCLES = 4_000_000  # some 2 ms; a step takes less


def _behind(*_args):
    """Keeps the current stream busy. Also serves as a hook of modules and tensors."""
    torch.cuda._sleep(CYCLES)


class _SlowExchange(TrainPipelineSemiSync):
    """Ids arrive late on the stream that looks them up."""

    def __init__(self, model, optimizer, device):
        super().__init__(model, optimizer, device, start_batch=STEPS + 1)

    def start_embedding_lookup(self, batch, context):
        with torch.cuda.stream(self._data_dist_stream):
            _behind()
        super().start_embedding_lookup(batch, context)


class _SlowOutputs(TrainPipelineFusedSparseDist):
    """Outputs are read late, after the lookups' stream has continued."""

    def __init__(self, model, optimizer, device):
        super().__init__(model, optimizer, device)
        model.register_forward_pre_hook(_behind)
        model.module.over.register_forward_hook(_behind)


def _train(rank, world_size, device, sharding_type, slow):
    plain, piped = (make_pipeline_model(world_size, device, sharding_type) for _ in range(2))
    batches = [pipeline_batch(rank, step, device) for step in range(STEPS)]
    torch.cuda.synchronize()
    optimizer = torch.optim.SGD(piped.module.over.parameters(), lr=0.01)
    pipeline = slow(piped, optimizer, device)
    remaining = iter(batches)
    seen = [pipeline.progress(remaining) for _ in range(STEPS)]
    torch.cuda.synchronize()
    optimizer = torch.optim.SGD(plain.module.over.parameters(), lr=0.01)
    for batch, prediction in zip(batches, seen, strict=True):
        optimizer.zero_grad()
        loss, expected = plain(batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(prediction, expected, rtol=1e-5, atol=1e-5)
    assert evicted(piped) == evicted(plain)
    return sum(evicted(plain).values())


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("slow", [_SlowExchange, _SlowOutputs])
def test_as_a_loop(run_ranks, device_type, slow, sharding_type):
    if device_type == "cpu":
        pytest.skip("a CPU has no streams")
    assert sum(run_ranks(2, _train, sharding_type, slow)) > 0
