"""Second derivatives of a lookup equal those of the dense float64 table."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import tensor_train as tt
from tests.support.gpu import needs_gpu
from torchrec_hkv.tensor_train import TTGroup

NAMES = [HealthCheck.function_scoped_fixture]  # by device


def first_and_second(out, inputs):
    """Gradients of a nonlinear loss, and gradients of their squared norm."""
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True, allow_unused=True)
    first = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, first, strict=True)]
    penalty = sum(gradient.square().sum() for gradient in first)
    if not penalty.requires_grad:
        return first, [torch.zeros_like(each) for each in inputs]
    second = torch.autograd.grad(penalty, inputs, allow_unused=True)
    second = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, second, strict=True)]
    return first, second


def check(shapes, feature_tables, bags, device, weighted=False, mean=False, pooled=True):
    bags = bags.to(device)
    leaves = [[c.requires_grad_() for c in tt.random_cores(s, device)] for s in shapes]
    weights = bags.weights.clone().requires_grad_() if weighted else None
    arguments = {"weights": weights, "mean": mean, "pooled": pooled}
    flat = [core for cores in leaves for core in cores]
    inputs = flat + ([weights] if weighted else [])
    group = TTGroup(shapes, feature_tables)
    out = group.lookup(flat, bags.ids, bags.offsets, bags.batch_size, **arguments)
    actual = first_and_second(out, inputs)
    doubles = [[core.detach().double().requires_grad_() for core in own] for own in leaves]
    if weighted:
        arguments["weights"] = weights.detach().double().requires_grad_()
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, doubles, strict=True)]
    reference = tt.reference_lookup_by_sums(tables, feature_tables, bags, **arguments)
    inputs = [core for own in doubles for core in own]
    inputs += [arguments["weights"]] if weighted else []
    expected = first_and_second(reference, inputs)
    for one, other in zip(actual, expected, strict=True):
        scale = max((each.abs().max() for each in other if each.numel()), default=None)
        for gradient, of_table in zip(one, other, strict=True):
            tt.assert_near(gradient, of_table, magnitude=scale)


@settings(max_examples=40, deadline=None, suppress_health_check=NAMES)
@given(st.data(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_pooled_by_a_group_of_any_shapes(device_type, data, seed, weighted, mean):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(), min_size=1, max_size=3))
    feature_tables = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=4))
    bags = tt.random_bags(shapes, feature_tables, data.draw(st.integers(0, 9)))
    check(shapes, feature_tables, bags, device_type, weighted=weighted, mean=mean)


@settings(max_examples=20, deadline=None, suppress_health_check=NAMES)
@given(st.data(), st.integers(0, 2**32))
def test_unpooled(device_type, data, seed):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(dim=6), min_size=1, max_size=3))
    features = range(len(shapes))
    check(shapes, features, tt.random_bags(shapes, features, 5), device_type, pooled=False)


def test_first_derivatives_are_those_without_a_graph(device_type):
    shape, (features, size) = tt.LARGER[0], ([0, 0], 20)
    cores = [core.requires_grad_() for core in tt.random_cores(shape, device_type)]
    bags = tt.random_bags([shape], features, size).to(device_type)
    weights = bags.weights.requires_grad_()
    out = TTGroup([shape], features).lookup(
        cores, bags.ids, bags.offsets, size, weights=weights, mean=True
    )
    inputs, grad = [*cores, weights], torch.randn_like(out)
    plain = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    recorded = torch.autograd.grad(out, inputs, grad, create_graph=True)
    for one, other in zip(recorded, plain, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        tt.assert_near(one, other)


def test_cores_of_bfloat16(device_type):
    shape = tt.LARGER[1]
    cores = [c.requires_grad_() for c in tt.random_cores(shape, device_type, torch.bfloat16)]
    ids = torch.arange(20, device=device_type)
    offsets = torch.arange(21, device=device_type)
    out = TTGroup([shape]).lookup(cores, ids, offsets, 20)
    first, second = first_and_second(out, cores)
    doubles = [core.detach().double().requires_grad_() for core in cores]
    expected = first_and_second(tt.dense_table(shape, doubles)[ids], doubles)
    for actual, other in zip((first, second), expected, strict=True):
        for one, two in zip(actual, other, strict=True):
            assert one.dtype == torch.bfloat16
            tt.assert_near(one, two, 1e-2)


def test_a_gradient_of_cores_that_are_computed(device_type):
    """Gradients propagate through cores that are not leaves."""
    shape = tt.LARGER[1]
    cores = tt.random_cores(shape, device_type)
    scale = torch.tensor(2.0, device=device_type, requires_grad=True)
    ids = torch.arange(20, device=device_type)
    offsets = torch.arange(21, device=device_type)
    out = TTGroup([shape]).lookup([core * scale for core in cores], ids, offsets, 20).sum()
    (first,) = torch.autograd.grad(out, scale, create_graph=True)
    (second,) = torch.autograd.grad(first, scale)
    # The table has two cores, so the output is proportional to the square of the scale.
    torch.testing.assert_close(second, 2 * out.detach() / 4)


@needs_gpu
def test_ids_outside_of_the_table_have_no_part():
    shape = tt.LARGER[1]
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    ids = torch.tensor([3, -1, shape.num_embeddings, 7], device="cuda")
    offsets = torch.tensor([0, 2, 4], device="cuda")
    group = TTGroup([shape])
    actual = first_and_second(group.lookup(cores, ids, offsets, 2), cores)
    inside, offsets = ids[[0, 3]], torch.tensor([0, 1, 2], device="cuda")
    expected = first_and_second(group.lookup(cores, inside, offsets, 2), cores)
    for one, other in zip(actual, expected, strict=True):
        for gradient, alone in zip(one, other, strict=True):
            tt.assert_near(gradient, alone)
