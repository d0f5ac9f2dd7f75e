"""Row-wise Adam equals FBGEMM's formula of PARTIAL_ROWWISE_ADAM, in float64."""

import pytest
import torch

from tests.support.row_training import DIMS, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import RowWiseAdam


class _Reference:
    def __init__(self, betas, eps, decay, decay_mode, step_mode):
        self.betas, self.eps = betas, eps
        self.decay, self.decay_mode, self.step_mode = decay, decay_mode, step_mode

    def update(self, grads, touched, learning_rate):
        if not hasattr(self, "steps"):
            self.steps = torch.zeros(len(touched), dtype=torch.double)
            self.mean = torch.zeros_like(grads)
            self.square = torch.zeros(len(touched), dtype=torch.double)
            self.calls = 0
        self.calls += 1
        beta1, beta2 = self.betas
        for row in touched.nonzero().flatten().tolist():
            self.steps[row] += 1
            step = self.calls if self.step_mode == "global" else float(self.steps[row])
            grad = grads[row]
            if self.decay_mode == "coupled":
                grad = grad + self.decay * self.rows[row]
            self.mean[row] = beta1 * self.mean[row] + (1 - beta1) * grad
            self.square[row] = beta2 * self.square[row] + (1 - beta2) * grad.square().mean()
            root = (self.square[row] / (1 - beta2**step)).sqrt()
            direction = self.mean[row] / (1 - beta1**step) / (root + self.eps)
            if self.decay_mode == "decoupled":
                direction = direction + self.decay * self.rows[row]
            self.rows[row] -= learning_rate * direction

    def states(self):
        columns = [self.mean, self.square.unsqueeze(1)]
        if self.step_mode == "row":
            columns.append(self.steps.unsqueeze(1))
        return torch.cat(columns, dim=1)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("step_mode", ["global", "row"])
@pytest.mark.parametrize("mode", ["coupled", "decoupled"])
def test_equal_to_the_formula(device_type, dim, step_mode, mode):
    reference = _Reference((0.9, 0.99), 1e-6, 0.1, mode, step_mode)
    optimizer = RowWiseAdam(
        (0.9, 0.99), 1e-6, weight_decay=0.1, weight_decay_mode=mode, step_mode=step_mode
    )
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, dim))
