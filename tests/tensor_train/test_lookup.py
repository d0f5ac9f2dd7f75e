"""Lookups equal those in the dense table, computed by einsum in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTGroup, make_shape

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a name
)


def check(group, tables_cores, bags, **arguments):
    weights = bags.weights if arguments.pop("weighted", False) else None
    tables = [tt.dense_table(s, c) for s, c in zip(group.shapes, tables_cores, strict=True)]
    expected = tt.reference_lookup(tables, group.feature_tables, bags, weights=weights, **arguments)
    cores = [core for cores in tables_cores for core in cores]
    actual = group.lookup(
        cores, bags.ids, bags.offsets, bags.batch_size, weights=weights, **arguments
    )
    assert actual.dtype == torch.float32
    (size,) = tt.magnitudes(
        group.shapes,
        group.feature_tables,
        bags,
        tables_cores,
        None,
        **{"weights": weights, **arguments},
    )
    tt.assert_within(actual, expected, group.precision, size)


@SETTINGS
@given(st.data(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_pooled_by_a_group_of_any_shapes(device_type, data, seed, weighted, mean):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(), min_size=1, max_size=4))
    feature_tables = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=5))
    distinct = data.draw(st.sampled_from([None, 1, 3]))
    bags = tt.random_bags(shapes, feature_tables, data.draw(st.integers(0, 9)), distinct=distinct)
    group = TTGroup(shapes, feature_tables)
    cores = [tt.random_cores(s, device_type) for s in shapes]
    check(group, cores, bags.to(device_type), weighted=weighted, mean=mean)


@SETTINGS
@given(st.data(), st.integers(0, 2**32))
def test_unpooled(device_type, data, seed):
    torch.manual_seed(seed)
    shapes = data.draw(st.lists(tt.shapes(dim=6), min_size=1, max_size=3))
    bags = tt.random_bags(shapes, range(len(shapes)), 7)
    cores = [tt.random_cores(s, device_type) for s in shapes]
    check(TTGroup(shapes), cores, bags.to(device_type), pooled=False)


@tt.on_devices
@pytest.mark.parametrize("shape", tt.LARGER, ids=str)
@pytest.mark.parametrize("distinct", [None, 20])
def test_larger_tables(device_type, precision, shape, distinct):
    cores = [tt.random_cores(shape, device_type)]
    bags = tt.random_bags([shape], [0], 150, 20, distinct=distinct).to(device_type)
    group = TTGroup([shape], precision=precision)
    check(group, cores, bags, weighted=True)
    check(group, cores, bags, pooled=False)


@tt.on_devices
def test_all_ids_of_a_group(device_type, precision):
    shapes = tt.LARGER[:3]
    cores = [tt.random_cores(shape, device_type) for shape in shapes]
    ids = torch.cat([torch.randperm(s.num_embeddings) for s in shapes]).to(device_type)
    sizes = torch.tensor([0] + [s.num_embeddings for s in shapes], device=device_type)
    bags = tt.Bags(ids, sizes.cumsum(0), torch.randn(ids.numel(), device=device_type), 1)
    check(TTGroup(shapes, precision=precision), cores, bags, weighted=True)


def test_index_is_made_once(device_type):
    shape = tt.LARGER[0]
    bags = tt.random_bags([shape], [0], 30).to(device_type)
    group, cores = TTGroup([shape]), tt.random_cores(shape, device_type)
    args = (bags.ids, bags.offsets, bags.batch_size)
    for kind in ({}, {"mean": True}, {"weights": bags.weights}, {"pooled": False}):
        index = group.sort(*args, **kind)
        one = group.lookup(cores, *args, index=index, **kind)
        other = group.lookup(cores, *args, **kind)
        if device_type == "cpu":
            assert torch.equal(one, other)
        else:  # the order of float sums is undefined
            tt.assert_near(one, other, 1e-6)


def test_no_ids(device_type):
    shape = make_shape(100, 12, ranks=3)
    cores = tt.random_cores(shape, device_type)
    none = torch.empty(0, dtype=torch.int64, device=device_type)
    group = TTGroup([shape])
    zeros = torch.zeros(4, dtype=torch.int64, device=device_type)
    assert torch.equal(group.lookup(cores, none, zeros, 3).cpu(), torch.zeros(3, 12))
    assert group.lookup(cores, none, zeros[:1], 0).shape == (0, 12)
    assert group.lookup(cores, none, zeros, 3, pooled=False).shape == (0, 12)


@tt.on_devices
@pytest.mark.parametrize("shape", tt.LARGER[:3], ids=str)
def test_bfloat16_cores(device_type, precision, shape):
    cores = [tt.random_cores(shape, device_type, torch.bfloat16)]
    bags = tt.random_bags([shape], [0], 40).to(device_type)
    # The dense table uses the same rounded elements; arithmetic is in float32.
    check(TTGroup([shape], precision=precision), cores, bags, weighted=True, mean=True)
