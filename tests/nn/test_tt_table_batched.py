"""One lookup of tables of different shapes equals lookups of the tables one by one."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.nn import OptimType, TableBatchedTTEmbeddingBag
from torchrec_hkv.tensor_train import make_shape

SHAPES = [
    make_shape(300, 12, ranks=5),
    make_shape(50, 4, ranks=3, num_cores=2),
    make_shape(900, 16, ranks=4, num_cores=4),
]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_equal_to_dense_tables(device_type, mode):
    features = [2, 0, 1, 0]
    module = TableBatchedTTEmbeddingBag(
        SHAPES, features, sparse=False, mode=mode, device=device_type
    )
    bags = tt.random_bags(SHAPES, features, 9).to(device_type)
    out = module(bags.ids, bags.offsets, bags.weights)
    cores = list(module.tt_cores)
    tables = [
        tt.dense_table(shape, cores[module.tables.group.cores_of(t)])
        for t, shape in enumerate(SHAPES)
    ]
    expected = tt.reference_lookup(
        tables, features, bags, weights=bags.weights, mean=mode == "mean"
    )
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, cores, grad)
    for one, other in zip(actual, torch.autograd.grad(expected, cores, grad.double()), strict=True):
        tt.assert_near(one, other)


def test_fused_training_lowers_the_loss(device_type):
    module = TableBatchedTTEmbeddingBag(
        SHAPES, optimizer=OptimType.ADAM, learning_rate=0.02, device=device_type
    )
    bags = tt.random_bags(SHAPES, [0, 1, 2], 6, 2).to(device_type)
    target = torch.randn(6, 32, device=device_type) * (module(bags.ids, bags.offsets) != 0)
    losses = []
    for _ in range(80):
        loss = (module(bags.ids, bags.offsets) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_refused_offsets():
    module = TableBatchedTTEmbeddingBag(SHAPES)
    with pytest.raises(ValueError, match="must have 3 times the batch size, and one more"):
        module(torch.tensor([1]), torch.tensor([0, 1, 1]))
