"""TorchRec's train pipelines run models with tables on backends like plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from tests.support.backends import BACKENDS
from tests.support.models import Model
from tests.support.small_models import batch, make_small

pytestmark = pytest.mark.compat

PIPELINES = [TrainPipelineBase, TrainPipelineSparseDist]


class _WithLoss(nn.Module):
    """The pipelines require ``(loss, output)`` of the model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, features):
        output = self.model(features)
        return output.square().sum(), output.detach()


def _run(rank, world_size, device, backend, pipeline_type):
    plain, piped = (make_small(world_size, device, backend) for _ in range(2))
    with torch.no_grad():
        for name in ("s",):
            key = f"ebc.embedding_bags.{name}.weight"
            shards = zip(
                piped.state_dict()[key].local_shards(),
                plain.state_dict()[key].local_shards(),
                strict=True,
            )
            for to, source in shards:
                to.tensor.copy_(source.tensor)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
    pipeline = pipeline_type(_WithLoss(piped), optimizer, device)
    batches = iter([batch(rank, device, seed) for seed in range(5)])
    for seed in range(5):
        expected = plain(batch(rank, device, seed))
        expected.square().sum().backward()
        torch.testing.assert_close(pipeline.progress(batches), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pipeline_type", PIPELINES)
def test_pipelines(run_ranks, backend, pipeline_type):
    run_ranks(2, _run, backend, pipeline_type)
