"""GPU lookups of few prefixes with many ids, and of shapes with separate kernels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU

#: p, q and rank.
SHAPES = {
    "two cores": ((40, 700), (8, 8), 32),
    "two cores, uneven": ((37, 611), (6, 10), 24),
    "two cores, rank 64": ((20, 600), (8, 8), 64),
    "few prefixes": ((8, 6, 900), (4, 4, 6), 32),
    "few prefixes, odd": ((16, 6, 900), (2, 4, 5), 32),
    "four cores": ((8, 4, 5, 400), (4, 2, 2, 4), 32),
    "rank 48": ((20, 22, 25), (4, 4, 4), 48),
    "rank 36": ((20, 22, 25), (4, 4, 4), 36),
    "rank 16": ((20, 22, 25), (4, 4, 4), 16),
    "rank 20": ((20, 22, 25), (4, 4, 4), 20),
    "six last columns": ((20, 22, 25), (4, 4, 6), 32),
    "two last columns": ((20, 22, 25), (4, 4, 2), 32),
    "six last columns, rank 64": ((20, 22, 25), (4, 4, 6), 64),
    "ten last columns, rank 128": ((64, 22, 25), (2, 4, 10), 128),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("size", [15_000, 280_000])
def test_lookup_and_gradients(name, precision, size):
    """Weighted bags with one frequent id equal float64."""
    p, q, rank = SHAPES[name]
    shape = TTShape(math.prod(p), math.prod(q), p, q, (rank,) * (len(p) - 1))
    length = 10
    batch_size = size // length
    bags = tt.even_bags([shape], batch_size, length)
    bags.ids[: size // 20] = bags.ids[0]
    group = TTGroup([shape], optimizer=SGD(), precision=precision)
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    rows = tt.dense_table(shape, cores)[bags.ids] * bags.weights.double()[:, None]
    expected = rows.reshape(batch_size, length, -1).sum(dim=1)
    out = group.lookup(cores, bags.ids, bags.offsets, batch_size, weights=bags.weights)
    tt.assert_within(out, expected, precision)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, cores, grad.double())
    sizes = tt.magnitudes([shape], [0], bags, [cores], grad, weights=bags.weights)[1:]
    gradients = torch.autograd.grad(out, cores, grad)
    for one, other, bound in zip(gradients, wanted, sizes, strict=False):
        tt.assert_within(one, other, precision, bound)


@pytest.mark.parametrize("name", ["two cores", "few prefixes", "rank 48"])
def test_deterministic(name):
    """Blocks that share a prefix add its gradient in any order, with equal bits."""
    p, q, rank = SHAPES[name]
    shape = TTShape(math.prod(p), math.prod(q), p, q, (rank,) * (len(p) - 1))
    batch_size = 20_000
    bags = tt.even_bags([shape], batch_size, 10)
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    grad = torch.randn(batch_size, shape.embedding_dim, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out = TTGroup([shape]).lookup(cores, bags.ids, bags.offsets, batch_size)
            runs.append([out, *torch.autograd.grad(out, cores, grad)])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
