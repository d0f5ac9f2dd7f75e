"""The initial row is a pure function of (seed, table, id, column), the same on both devices."""

import pytest
import torch

from tests.support.batches import random_ids
from tests.support.gpu import needs_gpu
from tests.support.initial_value import initial_value
from torchrec_hkv.hash_table import Constant, Normal, TruncatedNormal, Uniform, initial_rows

EXACT = [Uniform(-0.3, 0.1), Uniform(5, 5), Constant(0.1), Constant(-3)]
NORMALS = [
    Normal(0, 0.01),
    Normal(-3, 2),
    TruncatedNormal(0, 1, -2, 2),
    TruncatedNormal(0.5, 0.1, 0.45, 3),
    TruncatedNormal(1, 0.5, -2, -0.5),  # a lower tail
    TruncatedNormal(1, 0.5, 3, 3.5),  # an upper tail, from 4 standard deviations
]


def ulps(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Distance in float32 ulps."""

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32).long()
        return torch.where(bits < 0, -(2**31) - bits, bits)

    return (order(values) - order(others)).abs()


def edge_ids(n: int) -> torch.Tensor:
    return torch.cat([random_ids(n), torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 1])])


@pytest.mark.parametrize("initializer", EXACT, ids=str)
def test_uniform_and_constant_follow_the_documented_formula(device_type, initializer):
    ids = edge_ids(20)
    rows = initial_rows(ids.to(device_type), 9, table="user", seed=-7, initializer=initializer)
    expected = [
        [initial_value(i, c, "user", -7, initializer) for c in range(9)] for i in ids.tolist()
    ]
    assert torch.equal(rows.cpu(), torch.tensor(expected))


@pytest.mark.parametrize("initializer", NORMALS, ids=str)
def test_normal_follows_the_documented_formula(device_type, initializer):
    """In float64, with the standard library's quantile function."""
    ids = edge_ids(2000)
    rows = initial_rows(ids.to(device_type), 9, table="user", seed=-7, initializer=initializer)
    expected = [
        [initial_value(i, c, "user", -7, initializer) for c in range(9)] for i in ids.tolist()
    ]
    assert ulps(rows.cpu(), torch.tensor(expected)).max() <= 1


@needs_gpu
@pytest.mark.parametrize("initializer", EXACT + NORMALS, ids=str)
def test_cpu_and_gpu_agree(initializer):
    ids = random_ids(100_000)
    cpu = initial_rows(ids, 67, table="t", seed=3, initializer=initializer)
    gpu = initial_rows(ids.cuda(), 67, table="t", seed=3, initializer=initializer).cpu()
    if initializer in EXACT:
        assert torch.equal(gpu, cpu)
    else:
        assert ulps(gpu, cpu).max() <= 4


@needs_gpu
@pytest.mark.parametrize("initializer", [Normal(1, 0.5), Normal(-3, 2)], ids=str)
def test_cpu_and_gpu_agree_where_mean_and_draw_cancel(initializer):
    ids = torch.arange(5_000_000)
    cpu = initial_rows(ids, 8, table="t", initializer=initializer)
    gpu = initial_rows(ids.cuda(), 8, table="t", initializer=initializer).cpu()
    assert cpu.abs().min() < 1e-6
    assert ulps(gpu, cpu).max() <= 4


@pytest.mark.parametrize("initializer", [EXACT[0], *NORMALS], ids=str)
def test_a_column_shard_holds_the_same_values(device_type, initializer):
    ids = random_ids(100).to(device_type)
    args = {"table": "t", "initializer": initializer}
    whole = initial_rows(ids, 32, **args)
    parts = [initial_rows(ids, 11, column_offset=0, **args)]
    parts.append(initial_rows(ids, 21, column_offset=11, **args))
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("initializer", [EXACT[0], *NORMALS], ids=str)
def test_order_and_company_do_not_matter(device_type, initializer):
    ids = random_ids(1000).to(device_type)
    args = {"table": "t", "initializer": initializer}
    rows = initial_rows(ids, 7, **args)
    order = torch.randperm(1000, device=device_type)
    assert torch.equal(initial_rows(ids[order], 7, **args), rows[order])
    assert torch.equal(initial_rows(ids[500:501], 7, **args), rows[500:501])
    assert initial_rows(ids[:0], 7, **args).shape == (0, 7)


@pytest.mark.parametrize("initializer", [Uniform(0, 1), Normal(0, 1)], ids=str)
def test_seed_table_and_id_all_matter(device_type, initializer):
    ids = random_ids(1000).to(device_type)
    rows = initial_rows(ids, 8, table="a", seed=0, initializer=initializer)
    for other in (
        initial_rows(ids, 8, table="b", seed=0, initializer=initializer),
        initial_rows(ids, 8, table="a", seed=1, initializer=initializer),
        initial_rows(ids + 1, 8, table="a", seed=0, initializer=initializer),
    ):
        assert (rows == other).float().mean() < 1e-3


def test_none_is_zeros(device_type):
    rows = initial_rows(random_ids(10).to(device_type), 5, table="t", initializer=None)
    assert (rows == 0).all()


def test_bad_arguments_are_refused():
    ids, unit = torch.arange(3), Uniform(0, 1)
    with pytest.raises(TypeError, match=r"ids must be a tensor of integers .* torch\.float32"):
        initial_rows(torch.rand(3), 4, table="t", initializer=unit)
    with pytest.raises(ValueError, match=r"dim is 0, but must be at least 1"):
        initial_rows(ids, 0, table="t", initializer=unit)
    with pytest.raises(ValueError, match=r"column_offset is -1, but must not be negative"):
        initial_rows(ids, 4, table="t", initializer=unit, column_offset=-1)
    with pytest.raises(ValueError, match=r"initializer is 'normal', but must be a Uniform, Norm"):
        initial_rows(ids, 4, table="t", initializer="normal")
    with pytest.raises(ValueError, match=r"seed is 9223372036854775808, but must be"):
        initial_rows(ids, 4, table="t", seed=2**63, initializer=unit)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("uniform", 1.0, 0.0, 0.0, 1.0), r"rows from 1 to 0, but the first must not be larger"),
        (("uniform", 0.0, float("inf"), 0.0, 1.0), r"from 0 to inf, but the two and their dist"),
        (("uniform", float("nan"), 0.0, 0.0, 1.0), r"from nan to 0, but the first must not"),
        (("cauchy", 0.0, 1.0, 0.0, 1.0), r"distribution 'cauchy', but must have 'uniform' or 'no"),
        (("normal", 0.0, 1.0, 0.0, 0.0), r"standard deviation of normal initial rows is 0, but"),
        (("normal", 0.0, 1.0, float("nan"), 1.0), r"mean of normal initial rows is nan, but must"),
        (("normal", 9.0, 10.0, 0.0, 1.0), r"from 9 to 10 hold 1\.\d+e-19 of the probability"),
    ],
)
def test_bad_arguments_of_the_op_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        torch.ops.torchrec_hkv.initial_rows(torch.arange(3), 4, 0, 0, *arguments)
