"""Factors, ranks and errors of Tensor-Train shapes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_hkv.tensor_train.shapes import (
    TTShape,
    factor_dim,
    factor_rows,
    make_shape,
    max_ranks,
)


@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from([2, 3, 4]))
def test_factorization_never_fails(rows, dim, cores):
    shape = make_shape(rows, dim, num_cores=cores, ranks=1)
    assert math.prod(shape.q) == dim
    assert math.prod(shape.p) == rows + shape.padding >= rows


@given(st.integers(1000, 10**12), st.sampled_from([2, 3, 4]))
def test_row_factors_are_balanced_and_pad_little(rows, cores):
    p = factor_rows(rows, cores)
    # Each factor is within one rounding of the root, so the product exceeds by less than that.
    assert max(p) <= rows ** (1 / cores) + 1
    assert math.prod(p) - rows < cores * math.prod(p) / min(p)


@pytest.mark.parametrize("dim", range(1, 130))
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_dim_factors_have_the_smallest_sum(dim, cores):
    divisors = [k for k in range(1, dim + 1) if dim % k == 0]
    best = min(
        sum(factors) + dim // math.prod(factors)
        for factors in itertools.combinations_with_replacement(divisors, cores - 1)
        if dim % math.prod(factors) == 0
    )
    factors = factor_dim(dim, cores)
    assert math.prod(factors) == dim
    assert sum(factors) == best
    assert max(factors[1:-1], default=0) <= min(factors[0], factors[-1])


def test_usual_dims():
    assert factor_dim(64, 3) == (4, 4, 4)
    assert factor_dim(96, 3) == (4, 4, 6)
    assert factor_dim(128, 3) == (4, 4, 8)
    assert factor_dim(16, 2) == (4, 4)
    assert factor_rows(10, 3) == (3, 2, 2)


def test_sizes_of_the_reference_table():
    shape = TTShape(11_000_000, 64, (200, 220, 250), (4, 4, 4), (32, 32))
    assert shape.core_shapes == [(200, 1, 4, 32), (220, 32, 4, 32), (250, 4, 32, 1)]
    assert shape.num_elements == 958_720
    assert shape.padding == 0
    assert round(shape.compression_ratio) == 734


@given(st.integers(100, 10**9), st.integers(4, 256), st.integers(2, 4), st.floats(1.0, 1e4))
def test_ranks_by_ratio_are_the_largest(rows, dim, cores, ratio):
    p, q = factor_rows(rows, cores), factor_dim(dim, cores)
    minimum = make_shape(rows, dim, num_cores=cores, ranks=1)
    if minimum.num_elements > int(rows * dim / ratio):
        with pytest.raises(ValueError, match="at rank 1"):
            make_shape(rows, dim, num_cores=cores, compression_ratio=ratio)
        return
    shape = make_shape(rows, dim, num_cores=cores, compression_ratio=ratio)
    assert shape.compression_ratio >= ratio * (1 - 1e-9)
    if shape.ranks != max_ranks(p, q):
        larger = make_shape(rows, dim, p=p, q=q, ranks=max(shape.ranks) + 1)
        assert larger.num_elements > int(rows * dim / ratio)


def test_ranks_by_bytes():
    shape = make_shape(11_000_000, 64, p=[200, 220, 250], q=[4, 4, 4], max_bytes=3_834_880)
    assert shape.ranks == (32, 32)
    half = make_shape(
        11_000_000, 64, p=[200, 220, 250], q=[4, 4, 4], max_bytes=1_917_440, element_size=2
    )
    assert half.ranks == (32, 32)
    smaller = make_shape(11_000_000, 64, p=[200, 220, 250], q=[4, 4, 4], max_bytes=3_834_879)
    assert smaller.ranks == (31, 31)


def test_one_rank_for_all_is_lowered_where_useless():
    assert make_shape(10, 3, ranks=100).ranks == max_ranks((3, 2, 2), factor_dim(3, 3))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"p": [3, 3, 3], "ranks": 2}, r"p is \[3, 3, 3\] with product 27.*num_embeddings, 100"),
        ({"q": [2, 2, 3], "ranks": 2}, r"q is \[2, 2, 3\] with product 12.*embedding_dim, 16"),
        ({"p": [10, 10], "q": [2, 2, 4], "ranks": 2}, r"q is \[2, 2, 4\], but 2 cores need 2"),
        ({"ranks": [2, 2, 2], "num_cores": 3}, "3 cores need 2"),
        ({"ranks": [9999, 2]}, "rank 1 can be at most"),
        ({"num_cores": 5, "ranks": 2}, "5, but must be 2, 3 or 4"),
        ({}, "No size was given"),
        ({"ranks": 2, "max_bytes": 100}, "ranks and max_bytes were given, but at most one"),
        ({"compression_ratio": 1e9}, "compression_ratio is .* at rank 1"),
        (
            {"compression_ratio": -1.0},
            "compression_ratio is -1.0, but must be a finite number of at",
        ),
        ({"compression_ratio": 0.5}, "compression_ratio is 0.5, but must be"),
        ({"max_bytes": 4}, "max_bytes is 4"),
        ({"ranks": [0, 2]}, "ranks has 0"),
        ({"p": [1 << 40, 1 << 40, 1], "ranks": 2}, r"must be below 2\^63"),
    ],
)
def test_refusals(arguments, match):
    with pytest.raises(ValueError, match=match):
        make_shape(100, 16, **arguments)


def test_refused_types():
    with pytest.raises(TypeError, match=r"ranks has 2\.5"):
        make_shape(100, 16, ranks=[2.5, 2])
    with pytest.raises(TypeError, match="num_embeddings has True"):
        make_shape(True, 16, ranks=2)
    with pytest.raises(TypeError, match="ranks has '32', but must be integers"):
        make_shape(100, 16, ranks="32")
    with pytest.raises(TypeError, match="p is 100, but must be a sequence of integers"):
        make_shape(100, 16, p=100, ranks=2)
    with pytest.raises(TypeError, match="q is 16, but must be a sequence of integers"):
        TTShape(100, 16, (10, 10), 16, (2,))
    with pytest.raises(TypeError, match="compression_ratio is '9', but must be a number"):
        make_shape(100, 16, compression_ratio="9")
