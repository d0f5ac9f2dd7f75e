"""Gradients under ``create_graph=True`` have a graph, or their use raises."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.embeddings import make_embedding, make_tables
from torchrec_hkv import OptimType, TTEmbeddingBag
from torchrec_hkv.tensor_train import TTShape

ROWS, DIM = 60, 8


def make(device, **arguments):
    return TTEmbeddingBag(
        ROWS, DIM, tt_ranks=4, weight_dist="normal", device=device, **{"sparse": False, **arguments}
    )


def filled(device, **arguments):
    """A bag with a cache that holds some ids."""
    bag = make(device, use_cache=True, cache_size=20, **arguments)
    bag(torch.arange(0, ROWS, 2, device=device), torch.tensor([0], device=device))
    bag.cache_populate()
    return bag


def penalty_gradients(out, inputs):
    """Gradients of a loss, and gradients of their squared norm."""
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), inputs)
    return [*first, *second]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_tensor_train_bags_are_those_of_the_full_weight(device_type, cache, mode, weighted):
    torch.manual_seed(3)
    bag = (filled if cache else make)(device_type, mode=mode)
    bags = tt.random_bags([bag.shape], [0], 10).to(device_type)
    weights = bags.weights.requires_grad_() if weighted else None
    rows = [bag.hot_rows.rows] if cache else []
    inputs = [*bag.tt_cores, *rows, *([weights] if weighted else [])]
    actual = penalty_gradients(bag(bags.ids, bags.offsets[:-1], weights), inputs)

    doubles = [each.detach().double().requires_grad_() for each in inputs]
    full = tt.dense_table(bag.shape, doubles[: len(bag.tt_cores)])
    if cache:
        full = full.index_put((bag.hot_rows.ids,), doubles[len(bag.tt_cores)])
    reference = tt.reference_lookup_by_sums(
        [full], [0], bags, weights=doubles[-1] if weighted else None, mean=mode == "mean"
    )
    for one, other in zip(actual, penalty_gradients(reference, doubles), strict=True):
        tt.assert_near(one, other, 1e-4)


def test_a_penalty_trains_a_tensor_train_bag(device_type):
    bag, ids = make(device_type), torch.arange(20, device=device_type)
    gradients = {}
    for factor in (0.0, 100.0):
        bag.zero_grad()
        loss = bag(ids, ids).square().sum()
        first = torch.autograd.grad(loss, list(bag.tt_cores), create_graph=True)
        (loss + factor * sum(each.square().sum() for each in first)).backward()
        gradients[factor] = [core.grad.clone() for core in bag.tt_cores]
    for plain, penalized in zip(gradients[0.0], gradients[100.0], strict=True):
        assert not torch.allclose(plain, penalized)


def test_table_batched_bags(device_type):
    from torchrec_hkv.nn import TableBatchedTTEmbeddingBag

    shapes = [TTShape(30, 4, (6, 5), (2, 2), (3,)), TTShape(60, 6, (4, 3, 5), (1, 2, 3), (2, 3))]
    bag = TableBatchedTTEmbeddingBag(shapes, sparse=False, weight_dist="normal", device=device_type)
    bags = tt.random_bags(shapes, [0, 1], 6).to(device_type)
    actual = penalty_gradients(bag(bags.ids, bags.offsets), list(bag.tt_cores))
    doubles = [core.detach().double().requires_grad_() for core in bag.tt_cores]
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, (doubles[:2], doubles[2:]), strict=True)]
    reference = tt.reference_lookup_by_sums(tables, [0, 1], bags)
    for one, other in zip(actual, penalty_gradients(reference, doubles), strict=True):
        tt.assert_near(one, other, 1e-4)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_weights_of_a_fused_bag_are_refused(device_type, cache, linear):
    """The weights' gradient depends on cores and rows, which have no gradients, even for a linear
    loss."""
    bag = (filled if cache else make)(device_type, sparse=True, optimizer=OptimType.SGD)
    ids = torch.arange(0, 20, 2, device=device_type)  # the cache, if any, holds all of them
    weights = torch.rand(10, device=device_type, requires_grad=True)
    out = bag(ids, torch.arange(10, device=device_type), weights)
    loss = out.sum() if linear else out.square().sum()
    (first,) = torch.autograd.grad(loss, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="weights of a Tensor-Train lookup can't be diff"):
        first.square().sum().backward()


@pytest.mark.parametrize("cache", [False, True])
def test_weights_of_a_fused_bag_in_evaluation(device_type, cache):
    """Evaluation trains nothing, so the derivative is complete."""
    bag = (filled if cache else make)(device_type, sparse=True).eval()
    bags = tt.random_bags([bag.shape], [0], 10).to(device_type)
    weights = bags.weights.requires_grad_()
    actual = penalty_gradients(bag(bags.ids, bags.offsets[:-1], weights), [weights])
    double = bags.weights.detach().double().requires_grad_()
    out = tt.reference_lookup_by_sums([bag.full_weight().double()], [0], bags, weights=double)
    for one, other in zip(actual, penalty_gradients(out, [double]), strict=True):
        tt.assert_near(one, other, 1e-4)


@pytest.mark.parametrize("make_module", [make_embedding, make_tables])
def test_gradients_of_hash_tables_are_refused(device_type, make_module):
    module = make_module(device=device_type)
    ids = torch.arange(5, device=device_type)
    rows = module(ids) if make_module is make_embedding else torch.cat(module([ids] * 3))
    (first,) = torch.autograd.grad(rows.square().sum(), module.anchor, create_graph=True)
    with pytest.raises(RuntimeError, match="radients of hash tables can't be differentiated again"):
        first.sum().backward()


def test_penalties_on_other_gradients_train_hash_tables(device_type):
    """The lookup is linear: the gradient that reaches it is complete."""
    module, twin = (make_embedding(device=device_type) for _ in range(2))
    ids = torch.arange(5, device=device_type)
    weight = torch.randn(4, 3, device=device_type, requires_grad=True)

    def loss(rows):
        plain = (rows @ weight).square().sum()
        (first,) = torch.autograd.grad(plain, weight, create_graph=True)
        return plain + first.square().sum()

    loss(module(ids)).backward()
    leaf = twin(ids).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    twin(ids).backward(wanted)
    module.apply_gradients(0.1)
    twin.apply_gradients(0.1)
    torch.testing.assert_close(module.eval()(ids), twin.eval()(ids))
