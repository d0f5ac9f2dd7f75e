"""Initial rows have the distribution that the initializer states."""

import math

import pytest
import torch

from torchrec_hkv.hash_table import Normal, TruncatedNormal, Uniform, initial_rows

IDS, DIM = 50_000, 16
N = IDS * DIM


def draw(initializer, device_type) -> torch.Tensor:
    """Initial rows as float64 ``[IDS, DIM]`` on the CPU."""
    ids = torch.arange(IDS, device=device_type)
    return initial_rows(ids, DIM, table="t", initializer=initializer).double().cpu()


def below(x: torch.Tensor | float, initializer) -> torch.Tensor:
    """The cumulative distribution function at x."""

    def normal(y):
        z = (torch.as_tensor(y, dtype=torch.double) - initializer.mean) / initializer.std
        return 0.5 * torch.erfc(-z / math.sqrt(2))

    if isinstance(initializer, Uniform):
        return (torch.as_tensor(x) - initializer.low) / (initializer.high - initializer.low)
    if isinstance(initializer, Normal):
        return normal(x)
    first, last = normal(initializer.low), normal(initializer.high)
    return (normal(x) - first) / (last - first)


def moments(initializer) -> tuple[float, float]:
    """Mean and standard deviation."""
    if isinstance(initializer, Uniform):
        return (
            (initializer.low + initializer.high) / 2,
            (initializer.high - initializer.low) / math.sqrt(12),
        )
    if isinstance(initializer, Normal):
        return initializer.mean, initializer.std
    mean, std = initializer.mean, initializer.std
    a, b = (initializer.low - mean) / std, (initializer.high - mean) / std

    def density(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    # Subtracts upper tails if the interval is above 0, and lower tails otherwise, for accuracy.
    sign = -1 if a > 0 else 1
    mass = abs(math.erfc(-sign * b / math.sqrt(2)) - math.erfc(-sign * a / math.sqrt(2))) / 2
    shift = (density(a) - density(b)) / mass
    variance = 1 + (a * density(a) - b * density(b)) / mass - shift * shift
    return mean + std * shift, std * math.sqrt(variance)


ALL = [
    Uniform(-2, 6),
    Normal(0, 1),
    Normal(-3, 0.25),
    TruncatedNormal(0, 1, -2, 2),
    TruncatedNormal(0.5, 2, 0.5, 1.5),
    TruncatedNormal(1, 0.5, 2, 9),
    TruncatedNormal(1, 0.5, -4, -0.5),
]


@pytest.mark.parametrize("initializer", ALL, ids=str)
def test_moments(device_type, initializer):
    values = draw(initializer, device_type)
    mean, std = moments(initializer)
    z = (values - mean) / std
    assert abs(z.mean()) < 5 / math.sqrt(N)
    # The standard error of a variance depends on the fourth moment.
    assert abs(z.square().mean() - 1) < 5 * math.sqrt((z**4).mean() / N)


@pytest.mark.parametrize("initializer", ALL, ids=str)
def test_kolmogorov_smirnov(device_type, initializer):
    values = draw(initializer, device_type).flatten().sort().values
    expected = below(values, initializer)
    ranks = torch.arange(N + 1) / N
    distance = max((ranks[1:] - expected).max(), (expected - ranks[:-1]).max())
    # A larger value has a probability of 2 exp(-2 * 2.5^2) = 7e-6.
    assert distance < 2.5 / math.sqrt(N)


@pytest.mark.parametrize("initializer", ALL, ids=str)
def test_columns_and_neighbouring_ids_are_not_correlated(device_type, initializer):
    values = draw(initializer, device_type)
    correlation = torch.corrcoef(values.T)
    assert (correlation - torch.eye(DIM)).abs().max() < 5 / math.sqrt(IDS)
    neighbours = torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))
    assert abs(neighbours[0, 1]) < 5 / math.sqrt(N)


def test_bounds_of_the_uniform(device_type):
    values = draw(Uniform(-2, 6), device_type)
    assert -2 <= values.min() < values.max() < 6


@pytest.mark.parametrize(
    "initializer",
    [
        TruncatedNormal(0, 1, -2, 2),
        TruncatedNormal(0, 1, -0.1, 0.7),  # bounds that float32 can't represent
        TruncatedNormal(3, 100, 0.1, 0.3),  # nearly uniform
        TruncatedNormal(0, 1, 5, 5.5),
        TruncatedNormal(0, 1, -5.5, -5),
        TruncatedNormal(0, 1, -3e38, 0),
        TruncatedNormal(0, 3e38, -3e38, 3e38),
    ],
    ids=str,
)
def test_bounds_of_the_truncated_normal(device_type, initializer):
    values = draw(initializer, device_type)
    low, high = torch.tensor([initializer.low, initializer.high]).double()
    assert low <= values.min() < values.max() <= high
    # The draws cover the whole range, as far as their number allows.
    quantiles = below(torch.stack([values.min(), values.max()]), initializer)
    assert quantiles[0] < 20 / N
    assert quantiles[1] > 1 - 20 / N


def test_a_normal_never_overflows(device_type):
    values = draw(Normal(0, 3e38), device_type)
    assert values.isfinite().all()
    assert values.abs().max() == torch.finfo(torch.float32).max
