"""TT-SVD recovers Tensor-Train tables exactly, and bounds its error on others."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTShape, max_ranks, to_dense, tt_svd


def relative_error(table, result):
    return float((table.double() - tt.dense_table(result.shape, result.cores)).norm()) / float(
        table.double().norm()
    )


@pytest.mark.parametrize(
    "shape",
    [
        TTShape(480, 8, (6, 8, 10), (2, 2, 2), (5, 7)),
        TTShape(470, 8, (24, 20), (2, 4), (6,)),
        TTShape(580, 16, (4, 5, 5, 6), (2, 2, 2, 2), (4, 6, 3)),
    ],
    ids=str,
)
def test_recovers_its_own(shape):
    # Tables without padding rows: zeros would raise the ranks.
    shape = TTShape(math.prod(shape.p), shape.embedding_dim, shape.p, shape.q, shape.ranks)
    table = tt.dense_table(shape, tt.random_cores(shape)).float()
    by_rank = tt_svd(table, ranks=shape.ranks, p=shape.p, q=shape.q)
    assert by_rank.relative_error < 2e-6
    assert relative_error(table, by_rank) == pytest.approx(by_rank.relative_error, abs=1e-6)
    by_error = tt_svd(table, max_error=1e-3, p=shape.p, q=shape.q)
    assert by_error.relative_error < 1e-3
    assert all(a <= b for a, b in zip(by_error.shape.ranks, shape.ranks, strict=True))


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("max_error", [0.5, 0.1, 0.01])
def test_stays_below_the_error(cores, max_error):
    table = torch.randn(200, 5) @ torch.diag(0.4 ** torch.arange(5.0)) @ torch.randn(5, 12)
    result = tt_svd(table, max_error=max_error, num_cores=cores)
    assert result.relative_error <= max_error * (1 + 1e-6)
    assert relative_error(table, result) == pytest.approx(result.relative_error, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("cores", [2, 3])
def test_error_is_near_the_best_there_is(cores):
    table = torch.randn(180, 12).double()
    shape = tt_svd(table, ranks=8, num_cores=cores).shape
    result = tt_svd(table, ranks=8, num_cores=cores)
    # The dropped singular values of each unfolding bound the error from both sides.
    dropped = []
    padded = torch.zeros(math.prod(shape.p), 12).double()
    padded[:180] = table
    order = [axis for k in range(cores) for axis in (k, cores + k)]
    unfolded = padded.reshape(*shape.p, *shape.q).permute(order)
    for k in range(1, cores):
        rows = math.prod(shape.p[:k]) * math.prod(shape.q[:k])
        values = torch.linalg.svdvals(unfolded.reshape(rows, -1))
        dropped.append(float(values[shape.ranks[k - 1] :].square().sum()))
    error = (result.relative_error * float(table.norm())) ** 2
    # The error does not count padding rows, but the decomposition includes them.
    assert error <= sum(dropped) * (1 + 1e-4)
    if cores == 2:
        assert error >= 0.5 * dropped[0]


def test_full_ranks_are_exact_and_zeros_are_zeros():
    table = torch.randn(30, 6)
    assert tt_svd(table, ranks=1000).relative_error < 1e-5
    assert tt_svd(table, max_error=0.0).relative_error < 1e-5
    zeros = tt_svd(torch.zeros(30, 6), ranks=2)
    assert zeros.relative_error == 0
    assert torch.equal(to_dense(zeros.shape, zeros.cores), torch.zeros(30, 6))


def test_cores_share_the_norm():
    result = tt_svd(torch.randn(300, 16) * 100, ranks=6)
    sizes = [float(core.norm() / core.numel() ** 0.5) for core in result.cores]
    assert max(sizes) / min(sizes) < 1.01


@pytest.mark.parametrize(
    ("table", "arguments", "match"),
    [
        (torch.randn(30), {"ranks": 2}, "must have two dimensions"),
        (torch.randn(0, 3), {"ranks": 2}, "none of them 0"),
        (torch.randn(30, 4), {}, "exactly one of ranks and max_error"),
        (torch.randn(30, 4), {"ranks": 2, "max_error": 0.1}, "exactly one"),
        (torch.randn(30, 4), {"max_error": -0.1}, "max_error is -0.1"),
        (torch.full((30, 4), math.inf), {"ranks": 2}, "infinite or NaN"),
        (torch.randn(30, 4), {"ranks": [500, 2]}, "rank 1 can be at most"),
        (torch.randn(30, 4), {"ranks": 2, "p": [2, 2, 2]}, "must be at least num_embeddings"),
    ],
)
def test_refusals(table, arguments, match):
    with pytest.raises(ValueError, match=match):
        tt_svd(table, **arguments)
    with pytest.raises(TypeError, match="must be of a float dtype"):
        tt_svd(torch.ones(3, 3, dtype=torch.long), ranks=1)


def test_ranks_never_exceed_what_the_shape_takes():
    result = tt_svd(torch.randn(50, 6), max_error=0.0)
    limits = max_ranks(result.shape.p, result.shape.q)
    assert all(a <= b for a, b in zip(result.shape.ranks, limits, strict=True))
