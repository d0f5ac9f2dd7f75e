"""SGD trains rows as ``torch.optim.SGD`` does."""

import pytest
import torch

from tests.support.row_training import DIMS, DenseReference, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import SGD

ARGUMENTS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True},
]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_equal_to_torch(device_type, dim, arguments):
    reference = DenseReference(
        lambda parameters: torch.optim.SGD(parameters, **arguments), ["momentum_buffer"]
    )
    assert_equal_to(reference, train_with_reference(SGD(**arguments), reference, device_type, dim))


class _Decoupled(DenseReference):
    """The row decays apart from the step."""

    def update(self, grads, touched, learning_rate):
        self.rows[touched] *= 1 - learning_rate * 0.1
        super().update(grads, touched, learning_rate)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_decoupled_weight_decay(device_type, momentum):
    reference = _Decoupled(
        lambda parameters: torch.optim.SGD(parameters, momentum=momentum), ["momentum_buffer"]
    )
    optimizer = SGD(momentum, weight_decay=0.1, weight_decay_mode="decoupled")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))
