"""AdamW trains rows as ``torch.optim.AdamW`` does."""

import pytest
import torch

from tests.support.row_training import (
    DIMS,
    DenseReference,
    RowByRowReference,
    assert_equal_to,
    train_with_reference,
)
from torchrec_hkv.hash_table import Adam, AdamW


def _reference(arguments):
    return DenseReference(
        lambda parameters: torch.optim.AdamW(parameters, **arguments), ["exp_avg", "exp_avg_sq"]
    )


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.95)}])
def test_equal_to_torch(device_type, dim, arguments):
    reference = _reference(arguments)
    assert_equal_to(
        reference, train_with_reference(AdamW(**arguments), reference, device_type, dim)
    )


def test_steps_by_row(device_type):
    reference = RowByRowReference(lambda: _reference({"weight_decay": 0.3}))
    optimizer = AdamW(weight_decay=0.3, step_mode="row")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))


def test_adam_with_decoupled_weight_decay_is_the_same(device_type):
    reference = _reference({"weight_decay": 0.3})
    optimizer = Adam(weight_decay=0.3, weight_decay_mode="decoupled")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))
