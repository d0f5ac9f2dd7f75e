"""Schemas, fakes and errors of the ops."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.hash_table import LAMB, SGD, Adam
from torchrec_hkv.tensor_train import TTGroup, TTShape

ops = torch.ops.torchrec_hkv
SHAPES = [TTShape(90, 6, (5, 4, 5), (1, 2, 3), (5, 4)), TTShape(50, 4, (5, 10), (2, 2), (3,))]


# Two indices of a batch on a GPU may differ in bytes, which the last check compares.
NO_VALUES = ("test_schema", "test_autograd_registration", "test_faketensor")
SORT_CHECKS = {"cpu": (*NO_VALUES, "test_aot_dispatch_dynamic"), "cuda": NO_VALUES}


def make(device="cpu", optimizer=None, shapes=SHAPES):
    group = TTGroup(shapes, optimizer=optimizer, names=["page", "user"][: len(shapes)])
    cores = [core for shape in shapes for core in tt.random_cores(shape, device)]
    bags = tt.random_bags(shapes, range(len(shapes)), 4).to(device)
    return group, cores, bags


@pytest.mark.slow
def test_opcheck_of_lookups(device_type):
    group, cores, bags = make(device_type)
    args = (group.handle, bags.ids, bags.offsets)
    for weights in (None, bags.weights):
        torch.library.opcheck(
            ops.tt_sort, (*args, weights, 4, False, True), test_utils=SORT_CHECKS[device_type]
        )
    index = group.sort(bags.ids, bags.offsets, 4, weights=bags.weights, mean=True)
    leaves = [core.requires_grad_() for core in cores]
    for given in (index, None):
        torch.library.opcheck(ops.tt_lookup, (leaves, *args, bags.weights, given, 4, True, True))
    grad = torch.randn(4, 10, device=device_type)
    detached = [core.detach() for core in cores]
    rest = (group.handle, grad, bags.ids, bags.offsets)
    torch.library.opcheck(ops.tt_gradients, (detached, *rest, bags.weights, index, 4, False, True))
    torch.library.opcheck(ops.tt_weights_gradient, (detached, *rest, index, 4, True))
    one = TTGroup(SHAPES[:1])
    ids = torch.tensor([3, 3, 80], device=device_type)
    offsets = torch.tensor([0, 3], device=device_type)
    index = one.sort(ids, offsets, 1, pooled=False)
    torch.library.opcheck(
        ops.tt_lookup, (leaves[:3], one.handle, ids, offsets, None, index, 1, False, False)
    )


def test_opcheck_of_fused_ops(device_type):
    group, cores, bags = make(device_type, Adam())
    states = group.make_states(device_type)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    rate = torch.tensor(0.1, device=device_type)
    index = group.sort(bags.ids, bags.offsets, 4, weights=bags.weights, mean=True)
    plain = group.sort(bags.ids, bags.offsets, 4)
    grad = torch.randn(4, 10, device=device_type)
    args, rest = (bags.ids, bags.offsets), (index, 4)
    torch.library.opcheck(
        ops.tt_update,
        (cores, states, step, group.handle, grad, *args, bags.weights, *rest, True, True, rate),
    )
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    # The backward writes the cores, which functional traces do not show: checks schema and fake
    # only.
    for given in (plain, None):
        torch.library.opcheck(
            ops.tt_lookup_fused,
            (anchor, cores, states, step, group.handle, *args, None, given, 4, False, True, rate),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("bad", [-1, 90, 2**62, -(2**63)])
def test_ids_outside_of_the_table(bad):
    group, cores, _ = make()
    ids = torch.tensor([5, bad, 3])
    with pytest.raises(ValueError, match=rf"table 'page' was asked for id {bad}.*ids 0 to 89"):
        group.lookup(cores, ids, torch.tensor([0, 2, 3]), 1)
    # 60 is a row of the first table only.
    with pytest.raises(ValueError, match=r"table 'user' was asked for id 60.*ids 0 to 49"):
        group.lookup(cores, torch.tensor([60, 60]), torch.tensor([0, 1, 2]), 1)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int32)}, TypeError, "ids must be of dtype Long"),
        ({"ids": torch.zeros(1, 3, dtype=torch.long)}, ValueError, "ids must have one dimension"),
        ({"offsets": torch.tensor([0, 2])}, ValueError, "offsets must have 3 elements"),
        ({"offsets": torch.tensor([1, 2, 3])}, ValueError, "offsets must begin with 0"),
        ({"offsets": torch.tensor([0, 3, 2])}, ValueError, "must not decrease"),
        ({"offsets": torch.tensor([0, 1, 2])}, ValueError, "offsets must end with the number"),
        ({"batch_size": -1}, ValueError, "batch_size is -1"),
        ({"weights": torch.zeros(2)}, ValueError, "weights must have 3 elements"),
        ({"weights": torch.zeros(3).double()}, TypeError, "weights must be of dtype Float"),
        ({"index": torch.zeros(2, dtype=torch.long)}, ValueError, "index must have 3 elements"),
        ({"pooled": False}, ValueError, "need tables of one dim"),
    ],
)
def test_bad_batches(change, error, match):
    group, cores, _ = make()
    arguments = {
        "ids": torch.tensor([1, 2, 3]), "offsets": torch.tensor([0, 2, 3]), "batch_size": 1
    }  # fmt: skip
    arguments.update(change)
    with pytest.raises(error, match=match):
        group.lookup(cores, **arguments)


def test_bad_cores():
    group, cores, bags = make()
    args = (bags.ids, bags.offsets, 4)
    with pytest.raises(ValueError, match="have 5 cores, but 4 were given"):
        group.lookup(cores[:4], *args)
    with pytest.raises(ValueError, match="core 1 of table 'page' must have 160 elements"):
        group.lookup([cores[0], cores[0], *cores[2:]], *args)
    with pytest.raises(TypeError, match="cores must be of dtype Float or BFloat16"):
        group.lookup([core.double() for core in cores], *args)
    with pytest.raises(TypeError, match="cores must be of dtype Float"):
        group.lookup([*cores[:4], cores[4].bfloat16()], *args)


def test_bad_update_changes_nothing():
    group, cores, bags = make(optimizer=Adam())
    before = [core.clone() for core in cores]
    states = group.make_states()
    step, rate = torch.zeros(1, dtype=torch.int64), torch.tensor(0.1)
    index = group.sort(bags.ids, bags.offsets, 4)

    def update(states=states, step=step, grad=None, rate=rate, group=group):
        grad = torch.ones(4, 10) if grad is None else grad
        ops.tt_update(
            cores, states, step, group.handle, grad, bags.ids, bags.offsets, None, index, 4,
            False, True, rate,
        )  # fmt: skip

    with pytest.raises(ValueError, match="the state of core 2 of table 'page' must have"):
        update(states=[*states[:2], states[0], *states[3:]])
    with pytest.raises(ValueError, match=r"grad must have shape \[4, 10\]"):
        update(grad=torch.ones(4, 9))
    with pytest.raises(ValueError, match="step must have 1 element"):
        update(step=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="learning_rate must be of dtype Float"):
        update(rate=torch.tensor(1))
    other = TTGroup(SHAPES)
    with pytest.raises(ValueError, match="has no optimizer"):
        update(group=other, states=other.make_states())
    assert all(map(torch.equal, cores, before))
    assert step.item() == 0


def test_precision():
    with pytest.raises(ValueError, match="precision is 'bf16', but must be 'fp32' or 'tf32'"):
        TTGroup(SHAPES, precision="bf16")
    group, cores, bags = make()
    assert group.outside("cpu") == 0
    group = TTGroup(SHAPES, precision="tf32")
    with pytest.raises(ValueError, match="precision is 'tf32', but on a CPU it must be 'fp32'"):
        group.lookup(cores, bags.ids, bags.offsets, 4)


def test_bad_groups():
    with pytest.raises(ValueError, match="at least one table"):
        TTGroup([])
    with pytest.raises(ValueError, match="a feature has table 2, but must have one of 0 to 1"):
        TTGroup(SHAPES, [0, 2])
    with pytest.raises(ValueError, match="optimizer is 'sgd'"):
        TTGroup(SHAPES, optimizer="sgd")
    with pytest.raises(ValueError, match="not trained by LAMB"):
        TTGroup(SHAPES, optimizer=LAMB())
    huge = TTShape(10**9, 1 << 15, (10**5, 10**4), (1, 1 << 15), (4,))
    with pytest.raises(ValueError, match="at most 16384"):
        TTGroup([huge], optimizer=SGD())
