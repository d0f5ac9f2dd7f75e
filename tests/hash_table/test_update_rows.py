"""The backward trains rows of any width, and of repeated ids, as float64 formulas do."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import (
    SGD,
    Constant,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)

OPTIMIZERS = {"sgd": SGD(), "rowwise_adagrad": RowWiseAdagrad(eps=1e-6)}


@pytest.mark.parametrize("dim", [1, 3, 7, 9, 12, 45, 63, 130, 513, 2048])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_dim_against_the_formula(device_type, dim, optimizer):
    """A weighted mean, in float64."""
    group = TableGroup(
        [TableSpec("t", 100, dim, initializer=Uniform(-1, 1))],
        [0],
        OPTIMIZERS[optimizer],
        device_type,
    )
    pool = random_ids(20)
    rows = initial_rows(pool, dim, table="t", initializer=Uniform(-1, 1)).double()
    states = torch.zeros(20, dtype=torch.double)
    for _ in range(3):
        bags = Bags.random(1, 40, torch.arange(20))
        ours = Bags(pool[bags.ids], bags.offsets, 40).to(device_type)
        grad, weights = torch.randn(40, dim), torch.rand(len(bags.ids))
        out = lookup(group, ours, weights.to(device_type), mean=True, learning_rate=0.05)
        out.backward(grad.to(device_type))
        lengths = bags.offsets.diff()
        bag_of = torch.repeat_interleave(torch.arange(40), lengths)
        scale = (weights.double() / lengths[bag_of]).unsqueeze(1)
        summed = (
            torch.zeros(20, dim).double().index_add_(0, bags.ids, grad.double()[bag_of] * scale)
        )
        if optimizer == "sgd":
            rows -= 0.05 * summed
        else:
            states += summed.square().mean(1)
            step = 0.05 / (states.sqrt() + 1e-6)
            rows -= torch.where(states > 0, step, 0.0).unsqueeze(1) * summed
    trained = rows_by_id(group)
    for row, id_ in enumerate(pool.tolist()):
        if id_ in trained:
            torch.testing.assert_close(trained[id_].double(), rows[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bag", [1, 7, 10**6])
def test_a_hot_id(device_type, bag):
    """One id occurs a million times: the output sums its row, and its gradients are summed once."""
    group = TableGroup(
        [TableSpec("t", 64, 8, initializer=Constant(0.375))], [0], SGD(), device=device_type
    )
    n = 10**6
    offsets = torch.arange(0, n + bag, bag, device=device_type).clamp(max=n)
    bags = Bags(torch.full((n,), 2**62, device=device_type), offsets, len(offsets) - 1)
    out = lookup(group, bags, learning_rate=1.0)
    # These sums, and those below, are exact in float32 in any order.
    assert torch.equal(out, (offsets.diff() * 0.375).float().unsqueeze(1).expand_as(out))
    grad = (torch.randint(-8, 9, out.shape, device=device_type) / 1024).float()
    out.backward(grad)
    total = (grad.double() * offsets.diff().unsqueeze(1)).sum(0).cpu()
    assert torch.equal(rows_by_id(group)[2**62], (0.375 - total).float())


@pytest.mark.parametrize("n", [129, 160, 161, 257, 300, 700, 5000])
def test_hot_ids_in_small_batches(device_type, n):
    """In small batches, runs that are cut in pieces are complete."""
    group = TableGroup(
        [TableSpec("t", 10_000, 8, initializer=Uniform(-1, 1))], [0], SGD(), device=device_type
    )
    generator = torch.Generator().manual_seed(n)
    ids = torch.arange(n) // 3 + 100
    ids[: min(n, 140)] = 1
    ids[140:400] = 2
    ids = ids[torch.randperm(n, generator=generator)]
    bags = Bags(ids, torch.arange(n + 1), n).to(device_type)
    out = lookup(group, bags, learning_rate=1.0)
    before = rows_by_id(group)
    grad = torch.randint(-8, 9, out.shape, generator=generator).float() / 1024
    out.backward(grad.to(device_type))
    after = rows_by_id(group)
    for id_ in ids.unique().tolist():
        expected = before[id_].double() - grad[ids == id_].double().sum(0)
        torch.testing.assert_close(after[id_].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_weights(device_type):
    specs = [
        TableSpec("a", 100, 20, initializer=Uniform(-1, 1)),
        TableSpec("b", 100, 5, initializer=Uniform(-1, 1)),
    ]
    for mean in (False, True):
        group = TableGroup(specs, [0, 1], SGD(), device=device_type)
        bags = Bags.random(2, 20, random_ids(30))
        weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
        out = lookup(group, bags.to(device_type), weights, mean)
        grad = torch.randn_like(out)
        out.backward(grad)
        expected = []
        for feature, (spec, first) in enumerate(zip(specs, (0, 20), strict=True)):
            ids, offsets = bags.feature(feature)
            rows = initial_rows(ids, spec.dim, table=spec.name, initializer=Uniform(-1, 1)).double()
            lengths = offsets.diff()
            from_bag = grad[:, first : first + spec.dim].cpu().double()
            if mean:
                from_bag = from_bag / lengths.clamp(min=1).unsqueeze(1)
            expected.append((rows * from_bag.repeat_interleave(lengths, 0)).sum(1))
        torch.testing.assert_close(
            weights.grad.cpu().double(), torch.cat(expected), rtol=1e-5, atol=1e-5
        )
