"""Adam trains rows as ``torch.optim.Adam`` and ``SparseAdam`` do."""

import pytest
import torch

from tests.support.row_training import (
    DIMS,
    DenseReference,
    RowByRowReference,
    assert_equal_to,
    train_with_reference,
)
from torchrec_hkv.hash_table import Adam

STATES = ["exp_avg", "exp_avg_sq"]
ARGUMENTS = [
    {},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    # With a small eps, the first step would magnify the rounding error of g + 0.1 row.
    {"betas": (0.0, 0.99), "weight_decay": 0.1, "eps": 1e-2},
]


def _reference(arguments):
    return DenseReference(lambda parameters: torch.optim.Adam(parameters, **arguments), STATES)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_equal_to_torch(device_type, dim, arguments):
    reference = _reference(arguments)
    assert_equal_to(reference, train_with_reference(Adam(**arguments), reference, device_type, dim))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_steps_by_row(device_type, dim, arguments):
    """Each row counts its own steps."""
    reference = RowByRowReference(lambda: _reference(arguments))
    optimizer = Adam(**arguments, step_mode="row")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, dim))


class _Sparse(DenseReference):
    """PyTorch's optimizer of touched rows."""

    def update(self, grads, touched, learning_rate):
        rows = touched.nonzero().flatten()
        sparse = torch.sparse_coo_tensor(
            rows.unsqueeze(0), grads[rows], grads.shape, check_invariants=True
        )
        self._parameter.grad = sparse
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()


def test_equal_to_sparse_adam(device_type):
    reference = _Sparse(torch.optim.SparseAdam, STATES)
    assert_equal_to(reference, train_with_reference(Adam(), reference, device_type, 16))
