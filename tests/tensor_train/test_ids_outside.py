"""On a GPU, ids outside of their tables have no rows, and are counted."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("batch_size", [6, 6000])
def test_ids_outside_are_zeros_without_gradient_and_counted(batch_size):
    shape = tt.LARGER[1]
    group = TTGroup([shape], optimizer=SGD())
    bags = tt.even_bags([shape], batch_size)
    for at, bad in ((3, -1), (7, shape.num_embeddings), (8, 2**62), (20, -(2**63))):
        bags.ids[at] = bad
    inside = (bags.ids >= 0) & (bags.ids < shape.num_embeddings)
    assert int((~inside).sum()) == 4
    cores = tt.random_cores(shape, "cuda")
    table = tt.dense_table(shape, cores)
    rows = table[bags.ids.where(inside, 0)] * inside[:, None]
    args = (bags.ids, bags.offsets, batch_size)
    tt.assert_near(group.lookup(cores, *args, pooled=False), rows)
    assert group.outside("cuda") == 4
    weights = bags.weights.clone().requires_grad_()
    out = group.lookup(cores, *args, weights=weights)
    tt.assert_near(out, (rows * bags.weights[:, None]).reshape(batch_size, 5, -1).sum(dim=1))
    grad = torch.randn_like(out)
    out.backward(grad)
    tt.assert_near(weights.grad, (rows * grad.repeat_interleave(5, 0)).sum(dim=1))
    leaves = [core.clone().requires_grad_() for core in cores]
    actual = torch.autograd.grad(group.lookup(leaves, *args), leaves, grad)
    only = tt.Bags(
        bags.ids[inside],
        torch.cat([inside.new_zeros(1).long(), inside.cumsum(0)])[bags.offsets],
        bags.weights[inside],
        batch_size,
    )
    expected = tt.reference_lookup([tt.dense_table(shape, leaves)], [0], only)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for one, other in zip(actual, wanted, strict=True):
        tt.assert_near(one, other, 2e-5)
