"""The initial row is a pure function of (seed, table, id, column), the same on both devices."""

import pytest
import torch

from tests.support.batches import random_ids
from tests.support.initial_value import initial_value
from torchrec_hkv.hash_table import initial_rows


def test_follows_the_documented_formula(device_type):
    ids = torch.cat([random_ids(20), torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 1])])
    rows = initial_rows(ids.to(device_type), 9, table="user", seed=-7, low=-0.3, high=0.1).cpu()
    expected = [
        [initial_value(i, c, "user", -7, -0.3, 0.1) for c in range(9)] for i in ids.tolist()
    ]
    assert torch.equal(rows, torch.tensor(expected))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_same_bits_on_cpu_and_gpu():
    ids = random_ids(100_000)
    args = {"table": "t", "seed": 3, "low": -0.0317, "high": 0.0291}
    cpu = initial_rows(ids, 67, **args)
    assert torch.equal(initial_rows(ids.cuda(), 67, **args).cpu(), cpu)


def test_a_column_shard_holds_the_same_values(device_type):
    ids = random_ids(100).to(device_type)
    args = {"table": "t", "low": -1.0, "high": 1.0}
    whole = initial_rows(ids, 32, **args)
    parts = [initial_rows(ids, 11, column_offset=0, **args)]
    parts.append(initial_rows(ids, 21, column_offset=11, **args))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_seed_table_and_id_all_matter(device_type):
    ids = random_ids(1000).to(device_type)
    rows = initial_rows(ids, 8, table="a", seed=0, low=0, high=1)
    for other in (
        initial_rows(ids, 8, table="b", seed=0, low=0, high=1),
        initial_rows(ids, 8, table="a", seed=1, low=0, high=1),
        initial_rows(ids + 1, 8, table="a", seed=0, low=0, high=1),
    ):
        assert (rows == other).float().mean() < 1e-3


def test_uniform_over_the_range(device_type):
    rows = initial_rows(torch.arange(50_000, device=device_type), 16, table="t", low=-2, high=6)
    assert rows.min() >= -2
    assert rows.max() < 6
    # Standard errors: 8 / sqrt(12) / sqrt(800,000) = 0.0026 for the mean; bins by the binomial.
    assert abs(rows.mean().item() - 2) < 5 * 0.0026
    counts = torch.histc(rows.cpu(), 16, -2, 6)
    assert ((counts - 50_000).abs() < 5 * 50_000**0.5).all()
    # Neither columns nor neighbouring ids are correlated.
    correlation = torch.corrcoef(rows.cpu().T)
    assert (correlation - torch.eye(16)).abs().max() < 5 / 50_000**0.5


def test_constant_rows(device_type):
    rows = initial_rows(random_ids(10).to(device_type), 5, table="t", low=0.25, high=0.25)
    assert (rows == 0.25).all()


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match=r"ids must be of dtype Long, but is of dtype Float"):
        initial_rows(torch.rand(3), 4, table="t", low=0, high=1)
    with pytest.raises(ValueError, match=r"dim is 0, but must be at least 1"):
        initial_rows(torch.arange(3), 0, table="t", low=0, high=1)
    with pytest.raises(ValueError, match=r"from 1 to 0, but the first must not be larger"):
        initial_rows(torch.arange(3), 4, table="t", low=1, high=0)
    with pytest.raises(ValueError, match=r"seed is 9223372036854775808, but must be"):
        initial_rows(torch.arange(3), 4, table="t", seed=2**63, low=0, high=1)
