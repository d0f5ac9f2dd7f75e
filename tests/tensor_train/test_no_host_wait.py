"""Warm steps on a GPU do not make the host wait."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU, no_waits
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU

GROUPS = {"one": [tt.LARGER[0]], "four cores": [tt.LARGER[2]], "several": tt.LARGER[:3]}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch_size", [40, 6000])
def test_warm_steps_do_not_wait(name, batch_size):
    shapes = GROUPS[name]
    group = TTGroup(shapes, optimizer=SGD())
    cores = [core for shape in shapes for core in tt.random_cores(shape, "cuda")]
    trained = tt.TrainedCores(group, cores)
    leaves = [core.clone().requires_grad_() for core in cores]
    batches = [tt.even_bags(shapes, batch_size) for _ in range(3)]
    grad = torch.randn(batch_size, group.total_dim, device="cuda")
    weights = [bags.weights.clone().requires_grad_() for bags in batches]

    def steps(bags, weight):
        args = (bags.ids, bags.offsets, batch_size)
        trained.step(bags, grad, mean=True)
        trained.step(bags, grad, weights=weight)
        group.lookup(leaves, *args).backward(grad)
        if len(shapes) == 1:
            out = group.lookup(leaves, *args, pooled=False)
            out.backward(torch.ones_like(out))

    steps(batches[0], weights[0])
    torch.cuda.synchronize()
    with no_waits():
        for bags, weight in zip(batches[1:], weights[1:], strict=True):
            steps(bags, weight)
    assert all(weight.grad is not None for weight in weights)
