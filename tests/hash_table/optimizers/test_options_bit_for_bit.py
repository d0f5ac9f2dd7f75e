"""Options of optimizers that change the gradient equal the same optimizer with that gradient."""

import pytest
import torch

from tests.support.batches import random_ids
from tests.support.narrow_rows import narrow_group, train_rows
from tests.support.row_training import read_rows
from torchrec_hkv.hash_table import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowWiseAdagrad,
    RowWiseAdam,
    Uniform,
    initial_rows,
)

OPTIMIZERS = {
    "SGD": SGD,
    "momentum": lambda **options: SGD(momentum=0.9, **options),
    "Nesterov": lambda **options: SGD(momentum=0.9, nesterov=True, **options),
    "Adagrad": Adagrad,
    "RowWiseAdagrad": RowWiseAdagrad,
    "max_norm": lambda **options: RowWiseAdagrad(max_norm=1.0, **options),
    "Adam": Adam,
    "AdamW": AdamW,
    "RowWiseAdam": RowWiseAdam,
    "own steps": lambda **options: RowWiseAdam(step_mode="row", **options),
    "LAMB": LAMB,
    "FTRL": lambda **options: FTRL(l1=0.01, l2=0.1, **options),
}
DIMS = (1, 5, 8, 20, 67)
ROWS = 60
STEPS = 4


def _group(optimizer, device, dim):
    return narrow_group(torch.float32, device, optimizer, dim, 200, Uniform(-0.5, 0.5))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_by_value(device_type, name, dim):
    ids = random_ids(ROWS).unique()
    clipping = _group(OPTIMIZERS[name](clip_value=0.25), device_type, dim)
    other = _group(OPTIMIZERS[name](), device_type, dim)
    for _ in range(STEPS):
        grad = torch.randn(len(ids), dim)
        train_rows(clipping, ids, grad, learning_rate=0.1)
        train_rows(other, ids, grad.clamp(-0.25, 0.25), learning_rate=0.1)
    for actual, expected in zip(read_rows(clipping, ids), read_rows(other, ids), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bounds_that_nothing_exceeds(device_type, name, dim):
    ids = random_ids(ROWS).unique()
    bounded = _group(OPTIMIZERS[name](clip_value=1e3, clip_norm=1e6), device_type, dim)
    other = _group(OPTIMIZERS[name](), device_type, dim)
    for _ in range(STEPS):
        grad = torch.randn(len(ids), dim)
        for group in (bounded, other):
            train_rows(group, ids, grad, learning_rate=0.1)
    for actual, expected in zip(read_rows(bounded, ids), read_rows(other, ids), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad, Adam])
def test_coupled_weight_decay(optimizer, dim):
    """On a CPU: a GPU may add the product in one rounding."""
    ids = random_ids(ROWS).unique()
    decaying = _group(optimizer(weight_decay=0.03), "cpu", dim)
    other = _group(optimizer(), "cpu", dim)
    rows = initial_rows(ids, dim, table="t", initializer=Uniform(-0.5, 0.5))
    for _ in range(STEPS):
        grad = torch.randn(len(ids), dim)
        train_rows(decaying, ids, grad, learning_rate=0.1)
        train_rows(other, ids, grad + torch.tensor(0.03) * rows, learning_rate=0.1)
        rows = read_rows(other, ids)[0].float()
    for actual, expected in zip(read_rows(decaying, ids), read_rows(other, ids), strict=True):
        assert torch.equal(actual, expected)


def test_many_numbers_of_steps(device_type):
    """Rows of one batch that count 1 to 90 steps of their own equal rows that are trained alone."""
    ids = random_ids(90).unique()
    grad = torch.randn(len(ids), 6)
    together, alone = (_group(Adam(step_mode="row"), device_type, 6) for _ in range(2))
    for last in range(1, len(ids) + 1):
        train_rows(together, ids[:last], grad[:last], learning_rate=0.01)
    for number in range(len(ids)):
        for _ in range(len(ids) - number):
            one = slice(number, number + 1)
            train_rows(alone, ids[one], grad[one], learning_rate=0.01)
    for actual, expected in zip(read_rows(together, ids), read_rows(alone, ids), strict=True):
        assert torch.equal(actual, expected)
