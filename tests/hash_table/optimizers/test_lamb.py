"""LAMB equals the published algorithm applied to each row, in float64."""

import pytest
import torch

from tests.support.batches import Bags, lookup, rows_by_id
from tests.support.row_training import DIMS, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import LAMB, Constant, TableGroup, TableSpec


class _Reference:
    def __init__(self, betas, eps, decay, step_mode):
        self.betas, self.eps, self.decay, self.step_mode = betas, eps, decay, step_mode

    def update(self, grads, touched, learning_rate):
        if not hasattr(self, "steps"):
            self.steps = torch.zeros(len(touched), dtype=torch.double)
            self.mean, self.square = torch.zeros_like(grads), torch.zeros_like(grads)
            self.calls = 0
        self.calls += 1
        self.steps[touched] += 1
        beta1, beta2 = self.betas
        for row in touched.nonzero().flatten().tolist():
            step = self.calls if self.step_mode == "global" else float(self.steps[row])
            self.mean[row] = beta1 * self.mean[row] + (1 - beta1) * grads[row]
            self.square[row] = beta2 * self.square[row] + (1 - beta2) * grads[row] ** 2
            root = (self.square[row] / (1 - beta2**step)).sqrt() + self.eps
            update = self.mean[row] / (1 - beta1**step) / root + self.decay * self.rows[row]
            length, wanted = self.rows[row].norm(), update.norm()
            ratio = float(length / wanted) if length > 0 and wanted > 0 else 1.0
            self.rows[row] -= learning_rate * ratio * update

    def states(self):
        columns = [self.mean, self.square]
        if self.step_mode == "row":
            columns.append(self.steps.unsqueeze(1))
        return torch.cat(columns, dim=1)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("step_mode", ["global", "row"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equal_to_the_formula(device_type, dim, step_mode, decay):
    reference = _Reference((0.9, 0.99), 1e-6, decay, step_mode)
    optimizer = LAMB((0.9, 0.99), 1e-6, decay, step_mode=step_mode)
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, dim))


def test_a_row_of_zeros_moves_and_a_zero_gradient_does_not_spoil_it(device_type):
    spec = TableSpec("t", 64, 4, initializer=Constant(0.0))
    group = TableGroup([spec], [0], LAMB(), device=device_type)
    bags = Bags(torch.tensor([3]), torch.tensor([0, 1]), 1).to(device_type)
    lookup(group, bags).backward(torch.zeros(1, 4, device=device_type))
    assert torch.equal(rows_by_id(group)[3], torch.zeros(4))
    lookup(group, bags, learning_rate=0.5).backward(torch.ones(1, 4, device=device_type))
    moved = rows_by_id(group)[3]
    # The second step averages 0 and 1, with bias correction.
    expected = -0.5 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
    torch.testing.assert_close(moved, torch.full((4,), expected))
