"""The weights' gradient if tables have different dims."""

from __future__ import annotations

import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


def test_weights_gradient_of_tables_of_different_dims():
    shapes, features = tt.LARGER[:3], [1, 0, 2, 1]
    cores = [tt.random_cores(shape, "cuda") for shape in shapes]
    bags = tt.random_bags(shapes, features, 15).to("cuda")
    weights = bags.weights.requires_grad_()
    out = TTGroup(shapes, features).lookup(
        [core for own in cores for core in own], bags.ids, bags.offsets, 15,
        weights=weights, mean=True,
    )  # fmt: skip
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    expected = tt.reference_lookup(tables, features, bags, weights=weights, mean=True)
    grad = torch.randn_like(out)
    out.backward(grad)
    tt.assert_near(weights.grad, torch.autograd.grad(expected, weights, grad.double())[0])
