"""The two precisions of products on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", tt.LARGER, ids=str)
def test_precisions_are_two(shape):
    cores = tt.random_cores(shape, "cuda")
    bags = tt.even_bags([shape])
    expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
    errors = {}
    for precision in ("fp32", "tf32"):
        group = TTGroup([shape], precision=precision)
        out = group.lookup(cores, bags.ids, bags.offsets, bags.batch_size)
        errors[precision] = float((out - expected).norm() / expected.norm())
    assert errors["fp32"] < 1e-5 < errors["tf32"] < 1e-3


SHARED = [
    TTShape(3500, 64, (14, 25, 10), (4, 4, 4), (32, 32)),
    TTShape(3500, 32, (14, 25, 10), (4, 2, 4), (32, 32)),
]


@pytest.mark.parametrize("shape", SHARED, ids=str)
@pytest.mark.parametrize("bags_of_3", [100, 8000])
def test_small_values_beside_large_ones(shape, bags_of_3):
    # Operands are scaled, whatever their magnitude: slices, and gradients of bags.
    cores = tt.random_cores(shape, "cuda")
    for core in cores:
        core[1::3] *= 1e-8
        core[2::9] *= 1e6
        core[4] = 0
        core.requires_grad_()
    ids = torch.randint(0, shape.num_embeddings, (3 * bags_of_3,), device="cuda")
    offsets = torch.arange(0, ids.numel() + 1, device="cuda")
    group = TTGroup([shape], precision="fp32")
    rows = group.lookup(cores, ids, offsets, ids.numel())
    expected = tt.dense_table(shape, cores)[ids]
    error = (rows - expected).norm(dim=1)
    assert bool((error <= 1e-5 * expected.norm(dim=1)).all())
    grad = torch.randn_like(rows) * 10.0 ** torch.randint(-9, 7, (ids.numel(), 1), device="cuda")
    actual = torch.autograd.grad(rows, cores, grad)
    wanted = torch.autograd.grad(expected, cores, grad.double())
    for one, other in zip(actual, wanted, strict=True):
        own = other.flatten(1).norm(dim=1)
        assert bool(((one - other).flatten(1).norm(dim=1) <= 1e-5 * own).all())


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_what_is_not_finite_is_seen(shape):
    cores = tt.random_cores(shape, "cuda")
    cores[2][3] = float("inf")
    ids = torch.arange(200, device="cuda")
    offsets = torch.arange(201, device="cuda")
    rows = TTGroup([shape], precision="fp32").lookup(cores, ids, offsets, 200)
    finite = rows.isfinite().all(dim=1)
    assert bool((finite == (ids % shape.p[2] != 3)).all())
