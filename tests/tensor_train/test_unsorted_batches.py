"""A lookup without an index sorts the batch, and equals a lookup with one."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape

SHAPES = [TTShape(90, 6, (5, 4, 5), (1, 2, 3), (5, 4)), TTShape(50, 4, (5, 10), (2, 2), (3,))]


def make(device_type):
    group = TTGroup(SHAPES, optimizer=SGD())
    cores = [core for shape in SHAPES for core in tt.random_cores(shape, device_type)]
    bags = tt.random_bags(SHAPES, range(2), 16).to(device_type)
    return group, cores, bags


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup(device_type, weighted, mode):
    group, cores, bags = make(device_type)
    batch = (bags.ids, bags.offsets, 16)
    pooling = {"weights": bags.weights if weighted else None, "mean": True}
    index = group.sort(*batch, **pooling)
    with mode():
        expected = group.lookup(cores, *batch, **pooling, index=index)
        torch.testing.assert_close(group.lookup(cores, *batch, **pooling), expected)


def test_gradients_of_cores_and_weights(device_type):
    group, cores, bags = make(device_type)
    batch = (bags.ids, bags.offsets, 16)
    index = group.sort(*batch, weights=bags.weights)
    grad = torch.randn(16, 10, device=device_type)
    gradients = []
    for given in (index, None):
        leaves = [tensor.clone().requires_grad_() for tensor in (*cores, bags.weights)]
        group.lookup(leaves[:-1], *batch, weights=leaves[-1], index=given).backward(grad)
        gradients.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("elements", [0, 1])
@pytest.mark.parametrize("weights_grad", [False, True])
def test_fused_update(device_type, elements, weights_grad):
    """With an anchor that the backward bypasses, and with one that it reaches."""
    group, cores, bags = make(device_type)
    batch = (bags.ids, bags.offsets, 16)
    grad = torch.randn(16, 10, device=device_type)
    rate = torch.tensor(0.1, device=device_type)
    results = []
    for given in (group.sort(*batch, weights=bags.weights), None):
        own = [core.clone() for core in cores]
        anchor = torch.zeros(elements, device=device_type, requires_grad=True)
        step = torch.zeros(1, dtype=torch.int64, device=device_type)
        weights = bags.weights.clone().requires_grad_(weights_grad)
        out = group.lookup_fused(
            anchor, own, group.make_states(device_type), step, *batch, rate, weights=weights,
            index=given,
        )  # fmt: skip
        out.backward(grad)
        assert step.item() == 1
        assert anchor.grad is None
        results.append([out.detach(), *own, *([weights.grad] if weights_grad else [])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert not torch.equal(results[1][1], cores[0])
