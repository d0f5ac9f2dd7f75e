"""Effective ranks and norms of rows and of gradients equal those of the dense table."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import (
    TTGroup,
    TTShape,
    effective_ranks,
    gradient_norms,
    initial_cores,
    row_norms,
    singular_values,
)

SHAPE = TTShape(504, 12, (7, 8, 9), (2, 2, 3), (5, 6))
FOUR = TTShape(360, 8, (3, 4, 5, 6), (2, 2, 2, 1), (4, 7, 3))


@pytest.mark.parametrize("shape", [SHAPE, FOUR, TTShape(56, 6, (7, 8), (2, 3), (4,))], ids=str)
def test_singular_values_are_those_of_the_unfoldings(device_type, shape):
    cores = tt.random_cores(shape, device_type)
    n = shape.num_cores
    order = [axis for k in range(n) for axis in (k, n + k)]
    unfolded = tt.dense_table(shape, cores).reshape(*shape.p, *shape.q).permute(order)
    for k, values in enumerate(singular_values(shape, cores), start=1):
        rows = math.prod(shape.p[:k]) * math.prod(shape.q[:k])
        expected = torch.linalg.svdvals(unfolded.reshape(rows, -1))[: shape.ranks[k - 1]]
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_effective_ranks(device_type):
    cores = tt.random_cores(SHAPE, device_type)
    full = effective_ranks(SHAPE, cores)
    assert all(1 < one <= rank for one, rank in zip(full, SHAPE.ranks, strict=True))
    for core in (cores[0], cores[1].transpose(1, 3)):
        core[..., 2:] = 0 if core is cores[0] else core[..., 2:]
    assert effective_ranks(SHAPE, cores)[0] <= 2 + 1e-9
    one_path = initial_cores(SHAPE, mean=5.0, std=0.0)
    assert effective_ranks(SHAPE, one_path) == pytest.approx([1.0, 1.0])
    assert effective_ranks(SHAPE, [torch.zeros_like(core) for core in cores]) == [0.0, 0.0]


def test_row_norms(device_type):
    cores = tt.random_cores(SHAPE, device_type)
    histogram = row_norms(
        SHAPE, cores, samples=3000, bins=10, generator=torch.Generator().manual_seed(5)
    )
    ids = torch.randint(0, 504, (3000,), generator=torch.Generator().manual_seed(5))
    norms = tt.dense_table(SHAPE, cores)[ids.to(device_type)].norm(dim=1)
    assert histogram.counts.sum() == 3000
    assert histogram.mean == pytest.approx(float(norms.mean()), rel=1e-5)
    assert histogram.largest == pytest.approx(float(norms.max()), rel=1e-5)
    middle = float(histogram.edges[5])
    assert abs(int(histogram.counts[:5].sum()) - int((norms < middle).sum())) <= 5
    equal = row_norms(SHAPE, [torch.zeros_like(core) for core in cores], samples=7)
    assert equal.counts.tolist() == [7] + [0] * 31
    with pytest.raises(ValueError, match="samples is 0"):
        row_norms(SHAPE, cores, samples=0)


def test_gradient_norms(device_type):
    shapes = [SHAPE, FOUR]
    cores = [[c.requires_grad_() for c in tt.random_cores(s, device_type)] for s in shapes]
    bags = tt.random_bags(shapes, [0, 1], 9).to(device_type)
    grad = torch.randn(9, 20, device=device_type)
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    tt.reference_lookup(tables, [0, 1], bags, mean=True).backward(grad.double())
    norms = gradient_norms(
        TTGroup(shapes), [c.detach() for own in cores for c in own], grad,
        bags.ids, bags.offsets, 9, mean=True,
    )  # fmt: skip
    expected = [[float(core.grad.norm()) for core in own] for own in cores]
    for one, other in zip(norms, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
