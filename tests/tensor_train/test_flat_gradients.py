"""Flat gradients of cores, and the update from them, equal those of the fused backward."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, RowWiseAdagrad
from torchrec_hkv.tensor_train import TTGroup, TTShape

ops = torch.ops.torchrec_hkv
SHAPES = [
    TTShape(90, 6, (5, 4, 5), (1, 2, 3), (5, 4)),
    TTShape(50, 4, (5, 10), (2, 2), (3,)),
    TTShape(100, 16, (3, 4, 3, 3), (2, 2, 2, 2), (2, 3, 2)),
]
OPTIMIZERS = [SGD(), Adagrad(eps=0.1), RowWiseAdagrad(eps=0.1), Adam(eps=0.1)]


def make(device, optimizer, dtype=torch.float32):
    group = TTGroup(SHAPES, optimizer=optimizer, names=["page", "user", "item"])
    cores = [core for shape in SHAPES for core in tt.random_cores(shape, device, dtype)]
    bags = tt.random_bags(SHAPES, range(3), 4, mean_length=2).to(device)
    grad = torch.randn(4, group.total_dim, device=device)
    return group, cores, bags, grad


def touched_slices(bags):
    """For each core of each table, the slices that the ids touch."""
    flags = []
    for table, shape in enumerate(SHAPES):
        begin, end = int(bags.offsets[4 * table]), int(bags.offsets[4 * table + 4])
        left, digits = bags.ids[begin:end].cpu(), []
        for p in reversed(shape.p):
            digits.append(left % p)
            left = left // p
        for p, digit in zip(shape.p, reversed(digits), strict=True):
            flag = torch.zeros(p)
            flag[digit] = 1
            flags.append(flag)
    return torch.cat(flags)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_and_flags(device_type, weighted):
    group, cores, bags, grad = make(device_type, SGD())
    kind = {"weights": bags.weights if weighted else None, "mean": weighted}
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4, **kind)
    separate = group.gradients(cores, grad, bags.ids, bags.offsets, 4, **kind)
    elements = sum(core.numel() for core in cores)
    tt.assert_near(flat[:elements], torch.cat([g.flatten() for g in separate]).double())
    assert torch.equal(flat[elements:].cpu(), touched_slices(bags))
    # A call leaves nothing for the next one.
    again = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4, **kind)
    tt.assert_near(again, flat.double())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_is_that_of_the_fused_backward(device_type, optimizer, dtype):
    group, cores, bags, _ = make(device_type, optimizer, dtype)
    states, step = group.make_states(device_type), torch.zeros(1, dtype=torch.int64)
    step = step.to(device_type)
    other_cores, other_states = [c.clone() for c in cores], [s.clone() for s in states]
    other_step, rate = step.clone(), torch.tensor(0.1, device=device_type)
    start = [core.clone() for core in cores]
    for _ in range(3):
        bags = tt.random_bags(SHAPES, range(3), 4, mean_length=2).to(device_type)
        grad = torch.randn(4, group.total_dim, device=device_type)
        batch = (bags.ids, bags.offsets)
        index = group.sort(*batch, 4)
        ops.tt_update(
            other_cores, other_states, other_step, group.handle, grad, *batch, None, index, 4,
            False, True, rate,
        )  # fmt: skip
        flat = group.flat_gradients(cores, grad, *batch, 4)
        group.apply_gradients(cores, states, step, flat, rate)
    assert step.item() == other_step.item() == 3
    assert not any(map(torch.equal, cores, start))
    if device_type == "cpu":
        assert all(map(torch.equal, cores, other_cores))
        assert all(map(torch.equal, states, other_states))
    else:  # the order of sums is undefined
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        for one, other in zip([*cores, *states], [*other_cores, *other_states], strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=bound, atol=bound)


def test_the_mean_of_two_ranks_is_the_update_of_both_batches(device_type):
    group, cores, bags, grad = make(device_type, SGD())
    other = tt.random_bags(SHAPES, range(3), 4, mean_length=2).to(device_type)
    other_grad = torch.randn_like(grad)
    rate = torch.tensor(0.1, device=device_type)
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4)
    flat += group.flat_gradients(cores, other_grad, other.ids, other.offsets, 4)
    expected = [core.double() for core in cores]
    gradients = [
        (a.double() + b.double()) / 2
        for a, b in zip(
            group.gradients(cores, grad, bags.ids, bags.offsets, 4),
            group.gradients(cores, other_grad, other.ids, other.offsets, 4),
            strict=True,
        )
    ]
    states = group.make_states(device_type)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    group.apply_gradients(cores, states, step, flat / 2, rate)
    for core, old, gradient in zip(cores, expected, gradients, strict=True):
        tt.assert_near(core, old - 0.1 * gradient)


def test_slices_without_a_flag_stay(device_type):
    group, cores, bags, grad = make(device_type, SGD())
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4)
    flat[sum(core.numel() for core in cores) :] = 0
    before = [core.clone() for core in cores]
    states, step = group.make_states(device_type), torch.zeros(1, dtype=torch.int64)
    step, rate = step.to(device_type), torch.tensor(0.1, device=device_type)
    group.apply_gradients(cores, states, step, flat, rate)
    assert all(map(torch.equal, cores, before))
    # The next update does not see the discarded gradients.
    bags = tt.random_bags(SHAPES, range(3), 4).to(device_type)
    fresh = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4)
    separate = group.gradients(cores, grad, bags.ids, bags.offsets, 4)
    elements = sum(core.numel() for core in cores)
    tt.assert_near(fresh[:elements], torch.cat([g.flatten() for g in separate]).double())


def test_opcheck(device_type):
    group, cores, bags, grad = make(device_type, Adam())
    index = group.sort(bags.ids, bags.offsets, 4)
    batch = (bags.ids, bags.offsets, None, index, 4, False, True)
    torch.library.opcheck(ops.tt_flat_gradients, (cores, group.handle, grad, *batch))
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    rate = torch.tensor(0.1, device=device_type)
    states = group.make_states(device_type)
    torch.library.opcheck(ops.tt_apply_gradients, (cores, states, step, group.handle, flat, rate))


def test_refused():
    group, cores, bags, grad = make("cpu", SGD())
    states, step, rate = group.make_states(), torch.zeros(1, dtype=torch.int64), torch.tensor(0.1)
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, 4)
    before = [core.clone() for core in cores]
    with pytest.raises(ValueError, match=rf"gradients must have {flat.numel()} elements"):
        group.apply_gradients(cores, states, step, flat[:-1], rate)
    with pytest.raises(TypeError, match="gradients must be of dtype Float"):
        group.apply_gradients(cores, states, step, flat.double(), rate)
    with pytest.raises(ValueError, match="cores, but 8 were given"):
        group.apply_gradients(cores[:-1], states, step, flat, rate)
    plain = TTGroup(SHAPES)
    with pytest.raises(ValueError, match="has no optimizer"):
        plain.apply_gradients(cores, plain.make_states(), step, flat, rate)
    assert all(map(torch.equal, cores, before))
    assert step.item() == 0
