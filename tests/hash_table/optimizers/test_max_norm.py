"""Row-wise Adagrad scales a row down to ``max_norm`` where its update makes it longer."""

import pytest
import torch
from torch.nn import functional
from torchrec.optim import RowWiseAdagrad as Stock

from tests.support import tensor_train as tt
from tests.support.batches import Bags, lookup, random_ids
from tests.support.row_training import (
    DIMS,
    WIDTHS,
    DenseReference,
    assert_equal_to,
    make_group,
    read_rows,
    train_with_reference,
)
from torchrec_hkv.hash_table import RowWiseAdagrad
from torchrec_hkv.tensor_train import TTGroup
from torchrec_hkv.tensor_train.fused_rows import check_hot_row_optimizer

#: Rows are longer than it at first, and a step moves them by about the learning rate.
BOUND = 0.5


class _Limited(DenseReference):
    """Rows are limited by PyTorch's function, after the update."""

    def __init__(self, make, names, decay=0.0):
        super().__init__(make, names)
        self._decay = decay

    def update(self, grads, touched, learning_rate):
        self.rows[touched] *= 1 - learning_rate * self._decay
        super().update(grads, touched, learning_rate)
        self.rows[touched] = self._limited(self.rows[touched])

    @staticmethod
    def _limited(rows):
        """What ``torch.nn.functional.embedding`` makes of a weight with ``max_norm``."""
        weight = rows.clone()
        functional.embedding(torch.arange(len(weight)), weight, max_norm=BOUND)
        return weight


@pytest.mark.parametrize("dim", [*DIMS, *WIDTHS])
@pytest.mark.parametrize("coupled", [0.0, 0.1])
def test_equal_to_torchrec_and_pytorch(device_type, dim, coupled):
    reference = _Limited(lambda p: Stock(p, eps=1e-3, weight_decay=coupled), ["sum"])
    optimizer = RowWiseAdagrad(eps=1e-3, weight_decay=coupled, max_norm=BOUND)
    trained = train_with_reference(optimizer, reference, device_type, dim, learning_rate=0.1)
    # PyTorch adds 1e-7 to the norm before it divides.
    assert_equal_to(reference, trained)
    norms = trained.rows.norm(dim=1)
    assert norms.max() <= BOUND * (1 + 1e-6)
    assert (norms > 0.99 * BOUND).any()


@pytest.mark.parametrize("dim", DIMS)
def test_shorter_rows_are_left_alone(device_type, dim):
    trained = []
    for bound in (None, 1e3):
        torch.manual_seed(3)
        reference = DenseReference(lambda p: Stock(p, eps=1e-3), ["sum"])
        optimizer = RowWiseAdagrad(eps=1e-3, max_norm=bound)
        trained.append(train_with_reference(optimizer, reference, device_type, dim))
        assert_equal_to(reference, trained[-1])
    torch.testing.assert_close(trained[1].rows, trained[0].rows, rtol=1e-6, atol=1e-6)


def test_with_decoupled_decay_and_clipping(device_type):
    reference = _Limited(lambda p: Stock(p, eps=1e-3), ["sum"], decay=0.2)
    optimizer = RowWiseAdagrad(
        eps=1e-3,
        weight_decay=0.2,
        weight_decay_mode="decoupled",
        clip_value=0.5,
        max_norm=BOUND,
    )
    trained = train_with_reference(
        optimizer, reference, device_type, 12, prepare=lambda grads: grads.clamp(-0.5, 0.5)
    )
    assert_equal_to(reference, trained)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_chance", [False, True])
def test_rows_of_16_bits(device_type, dtype, by_chance):
    """The float32 row is limited, then rounded."""
    optimizer = RowWiseAdagrad(max_norm=BOUND, stochastic_rounding=by_chance)
    group = make_group(optimizer, 8, device_type, dtype=dtype)
    names = random_ids(30).unique()
    bags = Bags(names, torch.arange(len(names) + 1), len(names)).to(device_type)
    for _ in range(3):
        lookup(group, bags, learning_rate=0.5).sum().backward()
    rows, _ = read_rows(group, names)
    assert rows.norm(dim=1).max() <= BOUND * (1 + 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        rows.norm(dim=1),
        torch.full((len(names),), BOUND, dtype=torch.double),
        rtol=2 * torch.finfo(dtype).eps,
        atol=0,
    )


@pytest.mark.parametrize("bound", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_impossible_bounds(bound):
    with pytest.raises(ValueError, match=r"RowWiseAdagrad: max_norm is .* None or a positive"):
        RowWiseAdagrad(max_norm=bound)


def test_tensor_train_tables_refuse_it():
    optimizer = RowWiseAdagrad(max_norm=0.5)
    with pytest.raises(ValueError, match=r"max_norm is 0\.5, but Tensor-Train tables store no"):
        TTGroup([tt.LARGER[0]], None, optimizer)
    with pytest.raises(ValueError, match="hot rows are trained by"):
        check_hot_row_optimizer(optimizer)
