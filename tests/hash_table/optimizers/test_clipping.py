"""Gradients are clipped by value and by the norm of the row's sum."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.support.batches import Bags, lookup, rows_by_id
from tests.support.pairwise import pairwise
from tests.support.row_training import (
    DIMS,
    WIDTHS,
    DenseReference,
    assert_equal_to,
    train_with_reference,
)
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, RowWiseAdagrad, TableGroup, TableSpec

#: Each row that is summed has some values beyond this, and some that are not.
VALUE = 0.5


def _clip_norm(grads, bound):
    """By PyTorch's function, a row at a time."""
    clipped = grads.clone()
    for row in clipped:
        parameter = nn.Parameter(row)
        parameter.grad = row
        if row.norm() > bound:
            # PyTorch adds 1e-6 to the norm.
            nn.utils.clip_grad_norm_([parameter], bound * float((row.norm() + 1e-6) / row.norm()))
    return clipped


@pytest.mark.parametrize(
    ("dim", "bounds", "kind"),
    pairwise([*DIMS, *WIDTHS], [(VALUE, None), (None, 1.0), (VALUE, 1.0)], [SGD, Adagrad, Adam]),
)
def test_by_value_and_norm(device_type, dim, bounds, kind):
    by_value, by_norm = bounds

    def prepare(grads):
        if by_value is not None:
            grads = grads.clamp(-by_value, by_value)
        return grads if by_norm is None else _clip_norm(grads, by_norm)

    names = {SGD: [], Adagrad: ["sum"], Adam: ["exp_avg", "exp_avg_sq"]}[kind]
    make = getattr(torch.optim, kind.__name__)
    # With a small eps, Adagrad's first step would magnify what rounding makes of g + 0.1 row.
    arguments = {} if kind is SGD else {"eps": 1e-2}
    reference = DenseReference(lambda p: make(p, weight_decay=0.1, **arguments), names)
    optimizer = kind(weight_decay=0.1, clip_value=by_value, clip_norm=by_norm, **arguments)
    assert_equal_to(
        reference, train_with_reference(optimizer, reference, device_type, dim, prepare=prepare)
    )


def test_the_output_is_clipped_before_its_gradients_are_summed(device_type):
    """Two bags with one id: each value counts with at most the bound."""
    group = TableGroup([TableSpec("t", 64, 3)], [0], SGD(clip_output=0.5), device=device_type)
    bags = Bags(torch.tensor([5, 5]), torch.tensor([0, 1, 2]), 2).to(device_type)
    weights = torch.ones(2, device=device_type, requires_grad=True)
    grad = torch.tensor([[2.0, -0.25, -3.0], [0.25, -0.25, -1.0]], device=device_type)
    lookup(group, bags, weights, learning_rate=1.0).backward(grad)
    assert rows_by_id(group)[5].tolist() == [-0.75, 0.5, 1.0]
    # The gradient of weights is that of the clipped output, as FBGEMM's.
    weights.grad = None
    lookup(group, bags, weights, learning_rate=1.0).backward(grad)
    expected = grad.clamp(-0.5, 0.5) @ torch.tensor([-0.75, 0.5, 1.0], device=device_type)
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("name", ["clip_value", "clip_norm", "clip_output"])
def test_nan_is_not_clipped_away(device_type, name):
    optimizer = dataclasses.replace(RowWiseAdagrad(), **{name: 1.0})
    group = TableGroup([TableSpec("t", 64, 2)], [0], optimizer, device=device_type)
    bags = Bags(torch.tensor([5]), torch.tensor([0, 1]), 1).to(device_type)
    grad = torch.tensor([[float("nan"), 1.0]], device=device_type)
    lookup(group, bags).backward(grad)
    assert rows_by_id(group)[5][0].isnan()
