"""Steps on several streams share a group's buffers on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("batch_size", [3000, 6000])
def test_streams_take_turns(batch_size):
    """Steps on two unsynchronized streams use the group's buffers in order."""
    shape = tt.LARGER[2]
    group = TTGroup([shape])
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    detached = [core.detach() for core in cores]
    batches = [tt.even_bags([shape], batch_size) for _ in range(6)]
    grad = torch.randn(batch_size, shape.embedding_dim, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for at, bags in enumerate(batches):
        with torch.cuda.stream(streams[at % 2]):
            found.append(group.gradients(detached, grad, bags.ids, bags.offsets, batch_size))
    torch.cuda.synchronize()
    for bags, gradients in zip(batches, found, strict=True):
        expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
        wanted = torch.autograd.grad(expected, cores, grad.double())
        for one, other in zip(gradients, wanted, strict=True):
            tt.assert_near(one, other, 2e-5)
