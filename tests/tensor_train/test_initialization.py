"""Initial cores give tables with the stated mean and variance."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tensor_train import dense_table
from torchrec_hkv.tensor_train import TTShape, initial_cores, make_shape, rows_of

DISTRIBUTIONS = ["uniform", "normal", "approx-uniform", "approx-normal"]


def sampled(shape, tables=8, count=3000, **arguments):
    """Entries of random rows of several tables, since those of one table are dependent."""
    return torch.cat(
        [
            rows_of(
                shape,
                initial_cores(shape, **arguments),
                torch.randint(0, shape.num_embeddings, (count,)),
            ).double()
            for _ in range(tables)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rank", [8, 32, 128])
@pytest.mark.parametrize("mean", [0.0, -0.3])
def test_mean_and_variance_of_three_cores(distribution, rank, mean):
    shape = TTShape(11_000_000, 64, (200, 220, 250), (4, 4, 4), (rank, rank))
    entries = sampled(shape, distribution=distribution, mean=mean, std=0.25)
    assert entries.mean() == pytest.approx(mean, abs=0.02)
    assert entries.var() == pytest.approx(0.0625, rel=0.06)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("cores", [2, 4])
def test_mean_and_variance_of_two_and_four_cores(distribution, cores):
    shape = make_shape(5_000_000, 64, num_cores=cores, ranks=16)
    entries = sampled(shape, distribution=distribution, mean=0.1, std=0.02)
    assert entries.mean() == pytest.approx(0.1, abs=0.002)
    assert entries.std() == pytest.approx(0.02, rel=0.06)


def test_default_is_the_variance_of_torchrecs_rows():
    shape = make_shape(1_000_000, 16, ranks=16)
    entries = sampled(shape)
    assert entries.var() == pytest.approx(1 / 3_000_000, rel=0.06)
    assert abs(entries.mean()) < 0.03 / 1000


@pytest.mark.parametrize(("cores", "excess"), [(2, 0.1), (3, 0.1), (4, 1.2)])
def test_approx_normal_entries_have_normal_tails(cores, excess):
    shape = make_shape(5_000_000, 64, num_cores=cores, ranks=8)
    entries = sampled(shape, distribution="approx-normal", std=1.0)
    assert entries.pow(4).mean() / entries.var() ** 2 - 3 == pytest.approx(0, abs=excess)
    normal = sampled(shape, distribution="normal", std=1.0)
    assert normal.pow(4).mean() / normal.var() ** 2 - 3 > 0.4


def test_approx_uniform_entries_are_bounded():
    shape = make_shape(5000, 16, ranks=4)
    bound = math.sqrt(3) * 1.0 * math.sqrt(16)  # all 16 paths at their maximum
    entries = dense_table(shape, initial_cores(shape, "approx-uniform", std=1.0))
    assert entries.abs().max() <= bound


def test_rows_are_not_alike():
    shape = make_shape(5000, 64, ranks=16)
    for distribution in DISTRIBUTIONS:
        rows = torch.nn.functional.normalize(
            dense_table(shape, initial_cores(shape, distribution, std=1.0)), dim=1
        )
        pairs = (rows[:1000] * rows[torch.randperm(5000)[:1000]]).sum(dim=1)
        assert pairs.abs().mean() < 0.3


def test_generator_and_dtype():
    shape = make_shape(500, 8, ranks=4)
    one, other = (
        initial_cores(shape, generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16)
        for _ in range(2)
    )
    assert all(map(torch.equal, one, other))
    assert [core.shape for core in one] == list(map(torch.Size, shape.core_shapes))
    assert one[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"distribution": "gaussian"}, "distribution is 'gaussian'"),
        ({"std": -1.0}, "std is -1"),
        ({"mean": math.nan}, "mean is nan"),
    ],
)
def test_refusals(arguments, match):
    with pytest.raises(ValueError, match=match):
        initial_cores(make_shape(500, 8, ranks=4), **arguments)


def test_a_mean_takes_a_rank():
    with pytest.raises(ValueError, match=r"ranks are \[1, 4\], but a mean other than 0"):
        initial_cores(make_shape(500, 8, ranks=[1, 4]), mean=1.0)
