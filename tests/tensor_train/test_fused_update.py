"""The fused update equals each optimizer's formula on the slices that occur, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, RowWiseAdagrad
from torchrec_hkv.tensor_train import TTGroup, TTShape

LEARNING_RATE = 0.05
SMALL = TTShape(90, 6, (5, 4, 5), (1, 2, 3), (5, 5))


def by_slice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def sgd(core, grad, state, step):
    core -= LEARNING_RATE * grad


def adagrad(core, grad, state, step):
    total = state.setdefault("sum", torch.zeros_like(core))
    total += grad**2
    core -= LEARNING_RATE * grad / (total.sqrt() + 0.1)


def rowwise_adagrad(core, grad, state, step):
    total = state.setdefault("sum", torch.zeros_like(core[:, :1]))
    total += (grad**2).mean(dim=1, keepdim=True)
    core -= LEARNING_RATE * grad / (total.sqrt() + 0.1)


def adam(core, grad, state, step):
    first = state.setdefault("first", torch.zeros_like(core))
    second = state.setdefault("second", torch.zeros_like(core))
    touched = (grad != 0).any(dim=1)  # like torch.optim.SparseAdam: other slices do not change
    first[touched] = 0.9 * first[touched] + 0.1 * grad[touched]
    second[touched] = 0.99 * second[touched] + 0.01 * grad[touched] ** 2
    corrected = (second[touched] / (1 - 0.99**step)).sqrt() + 0.1
    core[touched] -= LEARNING_RATE * first[touched] / (1 - 0.9**step) / corrected


CASES = {
    "sgd": (SGD(), sgd),
    "adagrad": (Adagrad(eps=0.1), adagrad),
    "rowwise_adagrad": (RowWiseAdagrad(eps=0.1), rowwise_adagrad),
    "adam": (Adam(betas=(0.9, 0.99), eps=0.1), adam),
}


@tt.on_devices
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "shapes",
    [[SMALL], [tt.LARGER[0]], [tt.LARGER[1], SMALL, tt.LARGER[2]]],
    ids=["small", "one", "three"],
)
def test_equal_to_the_formula(device_type, precision, name, shapes):
    optimizer, formula = CASES[name]
    features = [*range(len(shapes)), 0]
    group = TTGroup(shapes, features, optimizer, precision=precision)
    cores = [core for shape in shapes for core in tt.random_cores(shape, device_type)]
    reference = [core.double().cpu() for core in cores]
    states, memory = group.make_states(device_type), [{} for _ in cores]
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    rate = torch.tensor(LEARNING_RATE, device=device_type)
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    for number in range(1, 4):
        bags = tt.random_bags(shapes, features, 12, 3)
        on_device = bags.to(device_type)
        out = group.lookup_fused(
            anchor,
            cores,
            states,
            step,
            on_device.ids,
            on_device.offsets,
            bags.batch_size,
            rate,
            weights=on_device.weights,
            mean=True,
        )
        for core in reference:
            core.requires_grad_()
        tables = [
            tt.dense_table(shape, reference[group.cores_of(t)]) for t, shape in enumerate(shapes)
        ]
        expected = tt.reference_lookup(tables, features, bags, weights=bags.weights, mean=True)
        tt.assert_within(out, expected, precision)
        grad = torch.randn(expected.shape)
        out.backward(grad.to(device_type))
        gradients = torch.autograd.grad(expected, reference, grad.double())
        reference = [core.detach() for core in reference]
        for core, gradient, state in zip(reference, gradients, memory, strict=True):
            formula(by_slice(core), by_slice(gradient), state, number)
        for core, other in zip(cores, reference, strict=True):
            if precision == "fp32":
                tt.assert_near(core, other, 2e-5)
            else:
                tt.assert_within(core, other, precision)
    assert step.item() == 3


def test_slices_that_do_not_occur_stay(device_type):
    shape = tt.LARGER[0]
    group = TTGroup([shape], optimizer=Adam(weight_decay=0.1))
    cores = tt.random_cores(shape, device_type)
    before = [core.clone() for core in cores]
    states = group.make_states(device_type)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    ids = torch.tensor([7, 7 + 10 * 25 * 3, 0], device=device_type)  # i_1 0, 3; i_2 0; i_3 7, 0
    offsets = torch.tensor([0, 3], device=device_type)
    rate = torch.tensor(0.1, device=device_type)
    group.lookup_fused(anchor, cores, states, step, ids, offsets, 1, rate).sum().backward()
    occur = [{0, 3}, {0}, {0, 7}]
    for core, old, state, slices in zip(cores, before, states, occur, strict=True):
        changed = (by_slice(core) != by_slice(old)).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) == slices
        used = (state != 0).any(dim=1).nonzero().flatten().tolist()
        assert set(used) == slices


def test_gradient_of_weights_is_of_the_cores_before_the_update(device_type):
    shape = tt.LARGER[1]
    group = TTGroup([shape], optimizer=SGD())
    cores = tt.random_cores(shape, device_type)
    bags = tt.random_bags([shape], [0], 20).to(device_type)
    weights = bags.weights.requires_grad_()
    table = tt.dense_table(shape, [core.clone() for core in cores])
    expected = tt.reference_lookup([table], [0], bags, weights=weights)
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    rate = torch.tensor(0.5, device=device_type)
    out = group.lookup_fused(
        anchor, cores, [core.new_zeros(0) for core in cores], step,
        bags.ids, bags.offsets, bags.batch_size, rate, weights=weights,
    )  # fmt: skip
    grad = torch.randn_like(out)
    out.backward(grad)
    tt.assert_near(weights.grad, torch.autograd.grad(expected, weights, grad.double())[0])


@pytest.mark.parametrize("stochastic", [False, True])
def test_bfloat16_cores(device_type, stochastic):
    shape = tt.LARGER[1]
    group = TTGroup([shape], optimizer=SGD(stochastic_rounding=stochastic))
    cores = tt.random_cores(shape, device_type, torch.bfloat16)
    before = [core.double().requires_grad_() for core in cores]
    bags = tt.random_bags([shape], [0], 50).to(device_type)
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    rate = torch.tensor(0.01, device=device_type)
    out = group.lookup_fused(
        anchor, cores, group.make_states(device_type), step,
        bags.ids, bags.offsets, bags.batch_size, rate,
    )  # fmt: skip
    grad = torch.randn_like(out)
    out.backward(grad)
    reference = tt.reference_lookup([tt.dense_table(shape, before)], [0], bags)
    gradients = torch.autograd.grad(reference, before, grad.double())
    for core, old, gradient in zip(cores, before, gradients, strict=True):
        exact = (old - 0.01 * gradient).detach()
        error = (core.double() - exact) / exact.abs().clamp(min=1e-3)
        # To nearest: half a unit of the last of 8 bits; stochastic: a whole unit.
        assert error.abs().max() < (2**-7 if stochastic else 2**-8) * 1.01
        if stochastic:
            assert error.mean().abs() < 5 * 2**-8 / error.numel() ** 0.5
