"""Updates of int8 rows are rounded up or down by chance, so that small steps are not lost on
average. The draws follow from seed, table, id, step and column alone."""

import numpy as np
import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from tests.support.int8_rows import draws, rounded
from tests.support.row_training import read_rows
from torchrec_hkv.hash_table import SGD, Adam, Constant, TableGroup, TableSpec, Uniform
from torchrec_hkv.hash_table.initial_rows import table_seed


def _group(device, optimizer, dim, capacity=6000, initializer=None, name="t", **options):
    spec = TableSpec(name, capacity, dim, initializer=initializer, dtype=torch.int8, **options)
    return TableGroup([spec], [0], optimizer, device=device)


def _train(group, ids, grad, learning_rate=1.0):
    bags = Bags(ids, torch.arange(len(ids) + 1), len(ids)).to(group.device)
    lookup(group, bags, learning_rate=learning_rate).backward(grad.to(group.device))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 17, 36, 64, 128, 132, 260])
def test_bit_for_bit(device_type, dim, seed):
    group = _group(device_type, SGD(rounding_seed=seed), dim, initializer=Uniform(-1, 1), seed=5)
    ids = random_ids(150).unique()
    _train(group, ids, torch.zeros(len(ids), dim))
    for step in range(2, 6):
        before = read_rows(group, ids)[0].float()
        grad = torch.randn(len(ids), dim) * 0.01
        _train(group, ids, grad)
        its = np.stack([draws(table_seed(5, "t"), id_, step, dim, seed) for id_ in ids.tolist()])
        assert torch.equal(read_rows(group, ids)[0].float(), rounded(before - grad, its))


@pytest.mark.parametrize("times", [40, 3000])
def test_hot_rows_bit_for_bit(device_type, times):
    """Whose gradients are added up in pieces: powers of two, so that sums are exact."""
    group = _group(device_type, SGD(), 64, initializer=Uniform(-1, 1))
    ids = random_ids(5)
    _train(group, ids, torch.zeros(5, 64))
    before = read_rows(group, ids)[0].float()
    grad = torch.randint(-8, 9, (5, times, 64)) / 1024
    order = torch.randperm(5 * times)
    _train(group, ids.repeat_interleave(times)[order], grad.flatten(0, 1)[order])
    its = np.stack([draws(table_seed(0, "t"), id_, 2, 64) for id_ in ids.tolist()])
    assert torch.equal(read_rows(group, ids)[0].float(), rounded(before - grad.sum(1), its))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.8])
def test_the_mean_is_exact(device_type, share):
    n = 20_000
    group = _group(device_type, SGD(), 4, 2 * n, Constant(1.0))
    ids = random_ids(n)
    # The first column keeps the scale, 1 / 127; the others begin as whole numbers of it.
    _train(group, ids, torch.zeros(n, 4))
    begun = (torch.tensor([127.0, 100.0, 27.0, -73.0]) / 127).expand(n, 4)
    assert group.assign(ids.to(device_type), None, 1, begun.to(device_type)).all()
    step = torch.tensor([0.0, share, share, share]) / 127
    before = (read_rows(group, ids)[0] * 127).round()
    _train(group, ids, -step.expand(n, 4))
    moved = (read_rows(group, ids)[0] * 127).round() - before
    assert set(moved[:, 1:].flatten().tolist()) == {0.0, 1.0}
    # What is off by an ulp of the scale may go down.
    assert float((moved[:, 0] == 0).double().mean()) > 0.999
    five_sigma = 5 * (share * (1 - share) / n) ** 0.5
    for column in (1, 2, 3):
        assert float(moved[:, column].mean()) == pytest.approx(share, abs=five_sigma)
    # Two columns go the same way no more often than by chance.
    alike = share**2 + (1 - share) ** 2
    five_sigma = 5 * (alike * (1 - alike) / n) ** 0.5
    for one, other in ((1, 2), (2, 3), (1, 3)):
        same = float((moved[:, one] == moved[:, other]).double().mean())
        assert same == pytest.approx(alike, abs=five_sigma)


def test_small_steps_add_up(device_type):
    """To the nearest, none of them would move the row. Stochastic rounding needs no argument."""
    group = _group(device_type, SGD(), 64, initializer=Constant(1.0))
    ids = torch.arange(2000)
    grad = torch.full((2000, 64), 2.0**-13)
    grad[:, 0] = 0.0  # keeps the scale
    for _ in range(64):
        _train(group, ids, grad)
    moved = 1 - float(read_rows(group, ids)[0][:, 1:].mean())
    assert moved == pytest.approx(64 * 2.0**-13, rel=0.05)


def test_draws_do_not_depend_on_capacity_or_order(device_type):
    ids = random_ids(500)
    gradients = torch.randn(3, 500, 5)

    def rows(order, seed=1, name="t", capacity=600, skipped=0):
        group = _group(device_type, SGD(rounding_seed=seed), 5, capacity, Constant(1.0), name)
        group.optimizer_steps.add_(skipped)
        for grad in gradients:
            _train(group, ids[order], grad[order], learning_rate=1e-2)
        return read_rows(group, ids)[0]

    forward = torch.arange(500)
    once = rows(forward)
    assert torch.equal(once, rows(torch.randperm(500), capacity=2000))
    for other in (rows(forward, seed=2), rows(forward, name="u"), rows(forward, skipped=1)):
        assert float((other != once).double().mean()) > 0.1


def test_states_stay_in_float32(device_type):
    """They are those of float32 rows, as long as gradients do not depend on rows."""
    ids = random_ids(100)
    groups = [
        TableGroup(
            [TableSpec("t", 200, 6, initializer=Uniform(-1, 1), dtype=of_rows)],
            [0],
            Adam(),
            device=device_type,
        )
        for of_rows in (torch.int8, torch.float32)
    ]
    for _ in range(5):
        grad = torch.randn(100, 6)
        for group in groups:
            _train(group, ids, grad, learning_rate=0.01)
    (rows, states), (exact_rows, exact_states) = (read_rows(group, ids) for group in groups)
    assert torch.equal(states, exact_states)
    torch.testing.assert_close(rows, exact_rows, rtol=0, atol=6 / 127)
    assert not torch.equal(rows, exact_rows)
