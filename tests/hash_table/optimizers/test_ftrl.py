"""FTRL-Proximal against the published algorithm, in float64."""

import numpy as np
import pytest
import torch

from tests.support.batches import Bags, lookup, rows_by_id
from tests.support.row_training import DIMS, DenseReference, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import FTRL, Constant, TableGroup, TableSpec


class _Reference:
    """Minimises, for every value, a sum of linear and quadratic terms."""

    def __init__(self, beta, l1, l2, initial):
        self.beta, self.l1, self.l2, self.initial = beta, l1, l2, initial

    def update(self, grads, touched, learning_rate):
        if not hasattr(self, "z"):
            self.z, self.n = np.zeros(grads.shape), np.full(grads.shape, self.initial)
        for row in touched.nonzero().flatten().tolist():
            g, w = grads[row].numpy(), self.rows[row].numpy()
            z, n = self.z[row], self.n[row]
            unseen = (z == 0) & (n == self.initial)
            z = np.where(unseen, -w * (self.beta + np.sqrt(n)) / learning_rate, z)
            sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / learning_rate
            z, n = z + g - sigma * w, n + g**2
            self.z[row], self.n[row] = z, n
            quadratic = (self.beta + np.sqrt(n)) / learning_rate + self.l2
            w = np.where(np.abs(z) <= self.l1, 0.0, -(z - np.sign(z) * self.l1) / quadratic)
            self.rows[row] = torch.from_numpy(w)

    def states(self):
        return torch.from_numpy(np.concatenate([self.z, self.n - self.initial], axis=1))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "arguments", [(0.0, 0.0, 0.0, 0.1), (1.0, 0.0, 0.5, 0.0), (0.5, 3.0, 0.1, 0.1)]
)
def test_equal_to_the_formula(device_type, dim, arguments):
    reference = _Reference(*arguments)
    optimizer = FTRL(*arguments)
    trained = train_with_reference(optimizer, reference, device_type, dim, learning_rate=0.1)
    assert_equal_to(reference, trained)
    share_of_zeros = float((trained.rows == 0).double().mean())
    assert (share_of_zeros > 0.05) == (arguments[1] > 0)


def test_without_regularisation_it_is_adagrad(device_type):
    adagrad = DenseReference(
        lambda p: torch.optim.Adagrad(p, eps=0.0, initial_accumulator_value=0.1)
    )
    trained = train_with_reference(
        FTRL(), adagrad, device_type, 8, learning_rate=0.1, rate_changes=False
    )
    torch.testing.assert_close(trained.rows, adagrad.rows, rtol=1e-5, atol=1e-5)


def test_a_zero_gradient_leaves_an_initial_row(device_type):
    spec = TableSpec("t", 64, 4, initializer=Constant(0.75))
    for optimizer in (FTRL(), FTRL(initial_accumulator=0.0), FTRL(1.0)):
        group = TableGroup([spec], [0], optimizer, device=device_type)
        bags = Bags(torch.tensor([3]), torch.tensor([0, 1]), 1).to(device_type)
        lookup(group, bags).backward(torch.zeros(1, 4, device=device_type))
        torch.testing.assert_close(rows_by_id(group)[3], torch.full((4,), 0.75))


def test_a_learning_rate_of_0_changes_nothing(device_type):
    group = TableGroup([TableSpec("t", 64, 4)], [0], FTRL(), device=device_type)
    bags = Bags(torch.tensor([3]), torch.tensor([0, 1]), 1).to(device_type)
    lookup(group, bags, learning_rate=0.0).backward(torch.ones(1, 4, device=device_type))
    assert torch.equal(rows_by_id(group)[3], torch.zeros(4))
    assert (group.export_table(0).states == 0).all()
