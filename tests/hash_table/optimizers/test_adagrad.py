"""Adagrad trains rows as ``torch.optim.Adagrad`` does."""

import pytest
import torch

from tests.support.row_training import DIMS, DenseReference, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import Adagrad


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", [{"eps": 1e-6}, {"eps": 1e-2, "weight_decay": 0.1}])
def test_equal_to_torch(device_type, dim, arguments):
    reference = DenseReference(
        lambda parameters: torch.optim.Adagrad(parameters, **arguments), ["sum"]
    )
    trained = train_with_reference(
        Adagrad(**arguments), reference, device_type, dim, learning_rate=0.1
    )
    assert_equal_to(reference, trained)


class _WithoutInitial(DenseReference):
    """A row's state sums only its gradients: it starts from zero."""

    def states(self):
        return super().states() - 0.3


def test_initial_accumulator(device_type):
    reference = _WithoutInitial(
        lambda p: torch.optim.Adagrad(p, eps=1e-6, initial_accumulator_value=0.3), ["sum"]
    )
    optimizer = Adagrad(1e-6, initial_accumulator=0.3)
    trained = train_with_reference(optimizer, reference, device_type, 8, learning_rate=0.1)
    assert_equal_to(reference, trained)


class _Decoupled(DenseReference):
    """The row decays apart from the step."""

    def update(self, grads, touched, learning_rate):
        self.rows[touched] *= 1 - learning_rate * 0.2
        super().update(grads, touched, learning_rate)


def test_decoupled_weight_decay(device_type):
    reference = _Decoupled(lambda parameters: torch.optim.Adagrad(parameters, eps=1e-6), ["sum"])
    optimizer = Adagrad(1e-6, weight_decay=0.2, weight_decay_mode="decoupled")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))
