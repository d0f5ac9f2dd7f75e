"""Static and dynamic tables of a collection share one all-to-all of ids."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.dist_data import KJTAllToAll

from tests.support.backends import BACKENDS
from tests.support.small_models import batch, make_small


def _exchanges(rank: int, world_size: int, device: torch.device, backend: str) -> tuple[int, int]:
    model = make_small(world_size, device, backend)
    model(batch(rank, device, 0)).sum().backward()  # makes the input distributions
    in_modules = sum(
        isinstance(module, KJTAllToAll)
        for input_dist in model.module.ebc._input_dists
        for module in input_dist.modules()
    )
    features = batch(rank, device, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.module.ebc(features).wait()
    bucketized = sum(
        event.count for event in profiler.key_averages() if event.key == "torchrec_hkv::bucketize"
    )
    dist.barrier()
    return in_modules, bucketized


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_all_to_all(run_ranks, backend):
    for in_modules, bucketized in run_ranks(2, _exchanges, backend):
        assert in_modules == 1
        assert bucketized == 1
