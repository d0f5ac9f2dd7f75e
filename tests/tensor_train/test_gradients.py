"""Gradients of cores and weights equal autograd's in the dense float64 table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTGroup

NAMES = [HealthCheck.function_scoped_fixture]  # by device and precision


def check(
    shapes, feature_tables, bags, device, precision="fp32", weighted=False, mean=False, pooled=True
):
    bags = bags.to(device)
    leaves = [[c.requires_grad_() for c in tt.random_cores(s, device)] for s in shapes]
    flat = [core for cores in leaves for core in cores]
    weights = bags.weights.clone().requires_grad_() if weighted else None
    group = TTGroup(shapes, feature_tables, precision=precision)
    arguments = {"weights": weights, "mean": mean, "pooled": pooled}
    out = group.lookup(flat, bags.ids, bags.offsets, bags.batch_size, **arguments)
    grad = torch.randn_like(out)
    inputs = flat + ([weights] if weighted else [])
    actual = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, leaves, strict=True)]
    reference = tt.reference_lookup(tables, feature_tables, bags, **arguments)
    expected = torch.autograd.grad(reference, inputs, grad.double(), allow_unused=True)
    sizes = tt.magnitudes(shapes, feature_tables, bags, leaves, grad, **arguments)[1:]
    for one, other, of, size in zip(actual, expected, inputs, sizes, strict=True):
        other = torch.zeros_like(of) if other is None else other
        tt.assert_within(one, other, precision, size)


@settings(max_examples=60, deadline=None, suppress_health_check=NAMES)
@given(st.data(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_pooled_by_a_group_of_any_shapes(device_type, data, seed, weighted, mean):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(), min_size=1, max_size=3))
    feature_tables = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=4))
    distinct = data.draw(st.sampled_from([None, 1, 3]))
    bags = tt.random_bags(shapes, feature_tables, data.draw(st.integers(0, 9)), distinct=distinct)
    check(shapes, feature_tables, bags, device_type, weighted=weighted, mean=mean)


@settings(max_examples=30, deadline=None, suppress_health_check=NAMES)
@given(st.data(), st.integers(0, 2**32))
def test_unpooled(device_type, data, seed):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(dim=6), min_size=1, max_size=3))
    features = range(len(shapes))
    bags = tt.random_bags(shapes, features, 5)
    check(shapes, features, bags, device_type, pooled=False)


@tt.on_devices
@pytest.mark.parametrize("shape", tt.LARGER, ids=str)
@pytest.mark.parametrize("distinct", [None, 20])
def test_larger_tables(device_type, precision, shape, distinct):
    bags = tt.random_bags([shape], [0], 150, 20, distinct=distinct)
    check([shape], [0], bags, device_type, precision, weighted=True)


@tt.on_devices
def test_many_ids(device_type, precision):
    # Enough work for sums in several parts, and several ids per prefix.
    shape = tt.LARGER[0]
    bags = tt.random_bags([shape], [0], 500, 40)
    check([shape], [0], bags, device_type, precision)


def test_an_id_in_every_bag(device_type):
    # Equal values round alike: a sequential sum in single precision would be off by far more than
    # the tolerance.
    shape = tt.LARGER[0]
    ids = torch.cat([torch.full((300_000,), 17), torch.randint(0, 3500, (20_000,))])
    ids = ids[torch.randperm(320_000)]
    offsets = torch.arange(0, 320_001, 20)
    bags = tt.Bags(ids, offsets, torch.ones(320_000), 16_000).to(device_type)
    cores = [c.requires_grad_() for c in tt.random_cores(shape, device_type)]
    out = TTGroup([shape]).lookup(cores, bags.ids, bags.offsets, 16_000)
    grad = torch.full_like(out, 0.1)
    reference = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
    expected = torch.autograd.grad(reference, cores, grad.double())
    for one, other in zip(torch.autograd.grad(out, cores, grad), expected, strict=True):
        tt.assert_near(one, other)


@pytest.mark.parametrize("shape", tt.LARGER[:3], ids=str)
def test_bfloat16_cores(device_type, shape):
    cores = [c.requires_grad_() for c in tt.random_cores(shape, device_type, torch.bfloat16)]
    bags = tt.random_bags([shape], [0], 40).to(device_type)
    out = TTGroup([shape]).lookup(cores, bags.ids, bags.offsets, bags.batch_size)
    grad = torch.randn_like(out)
    reference = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
    expected = torch.autograd.grad(reference, cores, grad.double())
    for one, other in zip(torch.autograd.grad(out, cores, grad), expected, strict=True):
        assert one.dtype == torch.bfloat16
        # Either side may round once to bfloat16.
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-5)


def test_only_weights_need_a_gradient(device_type):
    shape = tt.LARGER[1]
    cores = tt.random_cores(shape, device_type)
    bags = tt.random_bags([shape], [0], 20).to(device_type)
    weights = bags.weights.requires_grad_()
    out = TTGroup([shape]).lookup(
        cores, bags.ids, bags.offsets, bags.batch_size, weights=weights, mean=True
    )
    out.sum().backward()
    reference = tt.reference_lookup(
        [tt.dense_table(shape, cores)], [0], bags, weights=weights, mean=True
    )
    tt.assert_near(weights.grad, torch.autograd.grad(reference.sum(), weights)[0])


def test_results_do_not_depend_on_threads(set_threads):
    shape = tt.LARGER[0]
    cores = [c.requires_grad_() for c in tt.random_cores(shape)]
    bags = tt.random_bags([shape], [0], 300, 40)
    results = []
    for threads in (1, 2, 3, 2):
        set_threads(threads)
        out = TTGroup([shape]).lookup(cores, bags.ids, bags.offsets, bags.batch_size)
        torch.manual_seed(0)
        grads = torch.autograd.grad(out, cores, torch.randn_like(out))
        results.append([out.detach(), *grads])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
