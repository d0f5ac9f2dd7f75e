"""16-bit and int8 rows are rounded up or down at random, so that small steps are not lost."""

import pytest
import torch

from tests.support.batches import random_ids
from tests.support.narrow_rows import narrow_group, train_rows
from tests.support.row_training import WIDTHS, read_rows
from torchrec_hkv.hash_table import SGD, Adam, Constant, Uniform

DTYPES = [torch.float16, torch.bfloat16]
NARROW = [*DTYPES, torch.int8]
N = 5000


def _neighbours(dtype, value):
    """The values of the type at or below and above a float."""
    nearest = torch.tensor(value, dtype=torch.float64).to(dtype)
    up, down = torch.tensor(torch.inf, dtype=dtype), torch.tensor(-torch.inf, dtype=dtype)
    low = nearest if float(nearest) <= value else torch.nextafter(nearest, down)
    return float(low), float(torch.nextafter(low, up))


# Normal values, some whose neighbours have different exponents, and float16's subnormal ones.
@pytest.mark.parametrize("start", [1.0, -3.0, 1000.0, 2.0**-14, 3 * 2.0**-20, 2.0**-24])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_exact(device_type, dtype, share, start):
    low, high = _neighbours(dtype, start * 1.001)
    value = low + share * (high - low)
    group = narrow_group(
        dtype, device_type, SGD(stochastic_rounding=True), initializer=Constant(start)
    )
    ids = random_ids(N)
    grad = torch.full((N, 4), start, dtype=torch.double) - value
    train_rows(group, ids, grad.float())
    rows, _ = read_rows(group, ids)
    # What float32 arithmetic made of the step.
    value = float(torch.tensor(start).float() - grad[0, 0].float())
    assert set(rows.flatten().tolist()) == {low, high}
    share = (value - low) / (high - low)
    five_sigma = 5 * (share * (1 - share) / (4 * N)) ** 0.5
    assert float((rows == high).double().mean()) == pytest.approx(share, abs=five_sigma)
    # Two columns go the same way no more often than by chance.
    alike = share**2 + (1 - share) ** 2
    five_sigma = 5 * (alike * (1 - alike) / N) ** 0.5
    for column in range(3):
        same = rows[:, column] == rows[:, column + 1]
        assert float(same.double().mean()) == pytest.approx(alike, abs=five_sigma)


def _moved(dtype, device, optimizer):
    """How far 64 steps of 2^-13 move rows of ones on average. The first column stays: it keeps the
    scale of int8 rows."""
    group = narrow_group(dtype, device, optimizer, dim=64, initializer=Constant(1.0))
    ids = torch.arange(2000)
    grad = torch.full((2000, 64), 2.0**-13)
    grad[:, 0] = 0.0
    for _ in range(64):
        train_rows(group, ids, grad)
    return 1 - float(read_rows(group, ids)[0][:, 1:].mean())


@pytest.mark.parametrize("dtype", NARROW)
def test_small_steps_add_up(device_type, dtype):
    # int8 rows are rounded stochastically without an argument.
    optimizer = SGD() if dtype == torch.int8 else SGD(stochastic_rounding=True)
    moved = _moved(dtype, device_type, optimizer)
    assert moved == pytest.approx(64 * 2.0**-13, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_steps_are_lost_to_the_nearest_value(device_type, dtype):
    assert _moved(dtype, device_type, SGD(stochastic_rounding=False)) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_values_stay_and_infinite_ones_too(device_type, dtype):
    group = narrow_group(dtype, device_type, SGD(stochastic_rounding=True), capacity=100)
    values = torch.tensor([[1.5, -0.25, 0.0, float("inf")], [float("nan"), 2.0**-14, -64.0, 7.0]])
    for _ in range(20):
        train_rows(group, torch.tensor([1, 2]), -values)
        rows, _ = read_rows(group, torch.tensor([1, 2]))
        torch.testing.assert_close(rows, values.double(), rtol=0, atol=0, equal_nan=True)
        train_rows(group, torch.tensor([1, 2]), torch.where(values.isfinite(), values, 0.0))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_depends_on_seed_table_and_step_only(device_type, dtype):
    """Capacity, order and number of threads don't matter."""
    ids = random_ids(500)
    gradients = torch.randn(3, 500, 5)

    def rows(order, seed=1, name="t", capacity=600, skipped=0):
        optimizer = SGD(stochastic_rounding=True, rounding_seed=seed)
        group = narrow_group(dtype, device_type, optimizer, 5, capacity, Constant(1.0), name)
        group.optimizer_steps.add_(skipped)
        for grad in gradients:
            train_rows(group, ids[order], grad[order], learning_rate=1e-2)
        return read_rows(group, ids)[0]

    forward = torch.arange(500)
    once = rows(forward)
    assert torch.equal(once, rows(torch.randperm(500), capacity=2000))
    for other in (rows(forward, seed=2), rows(forward, name="u"), rows(forward, skipped=1)):
        assert float((other != once).double().mean()) > 0.1


@pytest.mark.parametrize("dtype", NARROW)
def test_states_stay_in_float32(device_type, dtype):
    """States equal those of float32 rows if gradients do not depend on rows."""
    ids = random_ids(100)
    optimizer = Adam() if dtype == torch.int8 else Adam(stochastic_rounding=True)
    groups = [
        narrow_group(rows, device_type, optimizer, 6, 200, Uniform(-1, 1))
        for rows in (dtype, torch.float32)
    ]
    for _ in range(5):
        grad = torch.randn(100, 6)
        for group in groups:
            train_rows(group, ids, grad, learning_rate=0.01)
    (rows, states), (exact_rows, exact_states) = (read_rows(group, ids) for group in groups)
    assert torch.equal(states, exact_states)
    tolerance = (
        {"rtol": 0, "atol": 6 / 127} if dtype == torch.int8 else {"rtol": 0.02, "atol": 0.02}
    )
    torch.testing.assert_close(rows, exact_rows, **tolerance)
    assert not torch.equal(rows, exact_rows)


def _trained(dtype, device, dim, ids, grad, columns=slice(None)):
    """Rows before and after a step all of whose numbers but the last are exact in float32."""
    optimizer = SGD(stochastic_rounding=True, clip_value=0.5, weight_decay=0.25)
    first, last, _ = columns.indices(dim)
    group = narrow_group(
        dtype, device, optimizer, last - first, initializer=Uniform(-2, 2), column_offset=first
    )
    train_rows(group, ids, torch.zeros(len(ids), last - first), learning_rate=0.0)
    before, _ = read_rows(group, ids)
    train_rows(group, ids, grad[:, columns], learning_rate=2.0**-7)
    return before, read_rows(group, ids)[0]


@pytest.mark.parametrize("dim", [7, 8, *WIDTHS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(device_type, dtype, dim):
    """With clipping and weight decay, too; both devices draw the same."""
    ids = random_ids(100)
    grad = torch.randint(-256, 257, (100, dim)) / 256
    before, after = _trained(dtype, device_type, dim, ids, grad)
    value = before - 2.0**-7 * (grad.double().clamp(-0.5, 0.5) + 0.25 * before)
    near = value.to(dtype)
    away = torch.where(near.double() < value, torch.inf, -torch.inf).to(dtype)
    other = torch.where(near.double() == value, near, torch.nextafter(near, away)).double()
    assert ((after == near) | (after == other)).all()
    # Of values in the middle of two, a half goes each way.
    middle = (value - near).abs() > 0.3 * (other - near).abs()
    up = float((after > value)[middle].double().mean())
    assert up == pytest.approx(0.5, abs=5 * 0.5 / int(middle.sum()) ** 0.5)
    if device_type != "cpu":
        for found, expected in zip(
            (before, after), _trained(dtype, "cpu", dim, ids, grad), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_of_columns_draws_as_the_whole(device_type, dtype, offset):
    ids = random_ids(100)
    grad = torch.randint(-256, 257, (100, 36)) / 256
    columns = slice(offset, offset + 20)
    whole = _trained(dtype, device_type, 36, ids, grad)
    part = _trained(dtype, device_type, 36, ids, grad, columns)
    for of_whole, of_part in zip(whole, part, strict=True):
        assert torch.equal(of_whole[:, columns], of_part)
