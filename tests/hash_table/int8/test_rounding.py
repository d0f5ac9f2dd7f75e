"""Updates of int8 rows round as a NumPy model of their random bits does."""

import numpy as np
import pytest
import torch

from tests.support.batches import random_ids
from tests.support.int8_rows import draws, rounded
from tests.support.narrow_rows import narrow_group, train_rows
from tests.support.row_training import read_rows
from torchrec_hkv.hash_table import SGD, Constant, Uniform
from torchrec_hkv.hash_table.initial_rows import table_seed


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 17, 36, 64, 128, 132, 260, 516, 1024, 1028])
def test_bit_for_bit(device_type, dim, seed):
    group = narrow_group(
        torch.int8, device_type, SGD(rounding_seed=seed), dim, initializer=Uniform(-1, 1), seed=5
    )
    ids = random_ids(150).unique()
    train_rows(group, ids, torch.zeros(len(ids), dim))
    for step in range(2, 6):
        before = read_rows(group, ids)[0].float()
        grad = torch.randn(len(ids), dim) * 0.01
        train_rows(group, ids, grad)
        its = np.stack([draws(table_seed(5, "t"), id_, step, dim, seed) for id_ in ids.tolist()])
        assert torch.equal(read_rows(group, ids)[0].float(), rounded(before - grad, its))


@pytest.mark.parametrize("times", [40, 3000])
def test_hot_rows_bit_for_bit(device_type, times):
    """Gradients of hot rows are summed in pieces. They are powers of two, so sums are exact."""
    group = narrow_group(torch.int8, device_type, SGD(), 64, initializer=Uniform(-1, 1))
    ids = random_ids(5)
    train_rows(group, ids, torch.zeros(5, 64))
    before = read_rows(group, ids)[0].float()
    grad = torch.randint(-8, 9, (5, times, 64)) / 1024
    order = torch.randperm(5 * times)
    train_rows(group, ids.repeat_interleave(times)[order], grad.flatten(0, 1)[order])
    its = np.stack([draws(table_seed(0, "t"), id_, 2, 64) for id_ in ids.tolist()])
    assert torch.equal(read_rows(group, ids)[0].float(), rounded(before - grad.sum(1), its))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.8])
def test_the_mean_is_exact(device_type, share):
    n = 20_000
    group = narrow_group(torch.int8, device_type, SGD(), 4, 2 * n, Constant(1.0))
    ids = random_ids(n)
    # The first column fixes the scale at 1 / 127; the others start as multiples of it.
    train_rows(group, ids, torch.zeros(n, 4))
    begun = (torch.tensor([127.0, 100.0, 27.0, -73.0]) / 127).expand(n, 4)
    assert group.assign(ids.to(device_type), None, 1, begun.to(device_type)).all()
    step = torch.tensor([0.0, share, share, share]) / 127
    before = (read_rows(group, ids)[0] * 127).round()
    train_rows(group, ids, -step.expand(n, 4))
    moved = (read_rows(group, ids)[0] * 127).round() - before
    assert set(moved[:, 1:].flatten().tolist()) == {0.0, 1.0}
    # Values that are off by an ulp of the scale may round down.
    assert float((moved[:, 0] == 0).double().mean()) > 0.999
    five_sigma = 5 * (share * (1 - share) / n) ** 0.5
    for column in (1, 2, 3):
        assert float(moved[:, column].mean()) == pytest.approx(share, abs=five_sigma)
    # Any two columns round the same way no more often than by chance.
    alike = share**2 + (1 - share) ** 2
    five_sigma = 5 * (alike * (1 - alike) / n) ** 0.5
    for one, other in ((1, 2), (2, 3), (1, 3)):
        same = float((moved[:, one] == moved[:, other]).double().mean())
        assert same == pytest.approx(alike, abs=five_sigma)
