"""Row-wise Adagrad trains rows as ``torchrec.optim.RowWiseAdagrad`` does."""

import pytest
from torchrec.optim import RowWiseAdagrad as Stock

from tests.support.row_training import DIMS, DenseReference, assert_equal_to, train_with_reference
from torchrec_hkv.hash_table import RowWiseAdagrad


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arguments", [{"eps": 1e-6}, {"eps": 1e-3, "weight_decay": 0.1}])
def test_equal_to_torchrec(device_type, dim, arguments):
    reference = DenseReference(lambda parameters: Stock(parameters, **arguments), ["sum"])
    optimizer = RowWiseAdagrad(**arguments)
    trained = train_with_reference(optimizer, reference, device_type, dim, learning_rate=0.1)
    assert_equal_to(reference, trained)


class _Decoupled(DenseReference):
    """The row decays apart from the step."""

    def update(self, grads, touched, learning_rate):
        self.rows[touched] *= 1 - learning_rate * 0.2
        super().update(grads, touched, learning_rate)


def test_decoupled_weight_decay(device_type):
    reference = _Decoupled(lambda parameters: Stock(parameters, eps=1e-6), ["sum"])
    optimizer = RowWiseAdagrad(1e-6, weight_decay=0.2, weight_decay_mode="decoupled")
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))


class _WithInitial(DenseReference):
    """Its sums start from 0.3, ours from zero."""

    def states(self):
        return super().states() - 0.3


def test_initial_accumulator(device_type):
    reference = _WithInitial(
        lambda parameters: Stock(parameters, eps=1e-6, initial_accumulator_value=0.3), ["sum"]
    )
    optimizer = RowWiseAdagrad(1e-6, initial_accumulator=0.3)
    assert_equal_to(reference, train_with_reference(optimizer, reference, device_type, 12))
