"""opcheck accepts the schemas, fakes and autograd formulas of the ops."""

import pytest
import torch

from tests.support.batches import Bags, insert, random_ids, rate
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform

ops = torch.ops.torchrec_hkv


@pytest.fixture
def case(device_type):
    group = TableGroup(
        [
            TableSpec("a", 200, 4, initializer=Uniform(-1, 1)),
            TableSpec("b", 200, 3, initializer=Uniform(-1, 1)),
        ],
        [0, 1, 0],
        SGD(),
        device=device_type,
    )
    bags = Bags.random(3, 8, random_ids(50)).to(device_type)
    return group, bags, insert(group, bags)


def test_find(case):
    group, bags, _ = case
    torch.library.opcheck(ops.find, (group.handle, bags.ids, bags.offsets, 8))


def test_find_or_insert(case):
    group, bags, _ = case
    pin = group.pin()
    args = (group._group.counters, group.handle, bags.ids, bags.offsets, 8, pin.number)
    torch.library.opcheck(ops.find_or_insert, args)


NUMBERS = [10, 0, 14]  # bags of each feature, if they differ


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_pooled_lookup(case, weighted, numbers, dtype):
    group, bags, slots = case
    if numbers is not None:  # distributes the fixture's bags differently
        slots = group.find_or_insert(bags.ids, bags.offsets, 0, None, numbers)
    anchor = torch.empty(0, device=bags.ids.device, requires_grad=True)
    weights = None
    if weighted:
        weights = torch.rand(len(slots), device=anchor.device, requires_grad=True)
    # The learning rate is 0, since opcheck runs the op several times and compares.
    args = (anchor, group.handle, bags.ids, bags.offsets, weights, slots, 8, True, None)
    args = (*args, rate(0.0, group), numbers, dtype)
    torch.library.opcheck(ops.pooled_lookup, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_gradient(case, dtype):
    group, bags, slots = case
    grad = torch.randn(8, group.total_dim, device=bags.ids.device).to(dtype)
    args = (group.handle, grad, bags.ids, bags.offsets, slots, 8, False)
    torch.library.opcheck(ops.weights_gradient, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_update_rows(case, dtype):
    group, bags, slots = case
    grad = torch.randn(8, group.total_dim, device=bags.ids.device).to(dtype)
    counters = group._group.counters
    args = (counters, group.handle, grad, bags.ids, bags.offsets, None, slots, 8, False)
    args = (*args, rate(0.0, group))
    torch.library.opcheck(ops.update_rows, args)


def test_ragged_bags(case):
    group, bags, _ = case
    counters, handle, device = group.counter_tensor, group.handle, bags.ids.device
    torch.library.opcheck(ops.find, (handle, bags.ids, bags.offsets, 0, NUMBERS))
    pin = group.pin()
    args = (counters, handle, bags.ids, bags.offsets, 0, pin.number, NUMBERS)
    torch.library.opcheck(ops.find_or_insert, args)
    slots = group.find_or_insert(bags.ids, bags.offsets, 0, None, NUMBERS)
    grad = torch.randn(24 * 4, device=device)
    where = (bags.ids, bags.offsets)
    args = (handle, grad, *where, slots, 0, True, NUMBERS)
    torch.library.opcheck(ops.weights_gradient, args)
    args = (counters, handle, grad, *where, None, slots, 0, True, rate(0.0, group), 1, NUMBERS)
    torch.library.opcheck(ops.update_rows, args)


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_initial_rows(device_type, distribution):
    args = (random_ids(5).to(device_type), 6, 2, 11, distribution, -1.0, 1.0, 0.5, 2.0)
    torch.library.opcheck(ops.initial_rows, args)


def test_gradcheck_of_weights(case):
    """The analytic gradient of the weights equals finite differences, in float32."""
    group, bags, slots = case
    anchor = torch.empty(0, device=bags.ids.device)
    weights = torch.rand(len(slots), device=bags.ids.device, requires_grad=True)

    def pooled(w):
        args = (anchor, bags.ids, bags.offsets, w, slots, 8, True, None, rate(0.0, group))
        return group.pooled_lookup(*args)

    assert torch.autograd.gradcheck(pooled, (weights,), eps=1e-2, atol=1e-3, rtol=1e-3)
