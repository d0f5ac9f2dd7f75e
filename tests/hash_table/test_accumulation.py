"""Gradients of several backwards are applied at once, like those of one larger batch."""

import gc

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from tests.support.row_training import exact_gradients
from torchrec_hkv.hash_table import SGD, Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

SPECS = [
    TableSpec("a", 200, 4, initializer=Uniform(-1, 1)),
    TableSpec("b", 200, 3, initializer=Uniform(-1, 1)),
]
FEATURES = [0, 1, 0]


def _group(optimizer, device):
    return TableGroup(SPECS, FEATURES, optimizer, device=device)


def _random_bags(size, pool):
    """Bags of 0, 1, 2 or 4 ids: their means are exact, so no sum depends on its order.

    If gradients of a row cancel out, Adam would turn the rounding error into a whole step.
    """
    lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (len(FEATURES) * size,))]
    offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    return Bags(pool[torch.randint(0, len(pool), (int(offsets[-1]),))], offsets, size)


def _together(batches, grads, weights):
    """The batches concatenated sample by sample: bags, gradient, weights."""
    ids, lengths, scales = [], [], []
    for feature in range(len(FEATURES)):
        for bags, scale in zip(batches, weights, strict=True):
            of_feature, offsets = bags.feature(feature)
            ids.append(of_feature)
            lengths.append(offsets.diff())
            first = int(bags.offsets[feature * bags.batch_size])
            scales.append(scale[first : first + len(of_feature)])
    offsets = torch.cat([torch.zeros(1).long(), torch.cat(lengths).cumsum(0)])
    bags = Bags(torch.cat(ids), offsets, sum(bags.batch_size for bags in batches))
    return bags, torch.cat(grads), torch.cat(scales)


@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(), Adam(clip_output=0.5)])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 0, 2), (0, 3)])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_as_one_batch(device_type, optimizer, sizes, mean, weighted):
    pool = random_ids(12)
    group, other = (_group(optimizer, device_type) for _ in range(2))
    for _ in range(2):
        batches = [_random_bags(size, pool) for size in sizes]
        grads = [exact_gradients(size, group.total_dim) for size in sizes]
        weights = [torch.randint(1, 9, (len(bags.ids),)) / 4 for bags in batches]
        steps = group.optimizer_steps.tolist()
        for i, (bags, grad, scale) in enumerate(zip(batches, grads, weights, strict=True)):
            before = rows_by_id(group)
            args = (group, bags.to(device_type), scale.to(device_type) if weighted else None, mean)
            if i + 1 < len(sizes):
                with group.accumulate():
                    out = lookup(*args, learning_rate=9.0)
                    out.backward(grad.to(device_type))
                after = rows_by_id(group)
                assert all(torch.equal(after[id_], row) for id_, row in before.items())
                assert group.optimizer_steps.tolist() == steps
            else:
                lookup(*args, learning_rate=0.25).backward(grad.to(device_type))
        bags, grad, scale = _together(batches, grads, weights)
        scale = scale.to(device_type) if weighted else None
        out = lookup(other, bags.to(device_type), scale, mean, learning_rate=0.25)
        out.backward(grad.to(device_type))
        assert group.optimizer_steps.tolist() == other.optimizer_steps.tolist()
    for table in range(len(SPECS)):
        actual, expected = rows_by_id(group, table), rows_by_id(other, table)
        assert actual.keys() == expected.keys()
        for id_, row in actual.items():
            torch.testing.assert_close(row, expected[id_], rtol=1e-5, atol=1e-6)


def test_weights_have_their_gradients_at_once(device_type):
    group, other = (_group(SGD(), device_type) for _ in range(2))
    bags = Bags.random(3, 6, random_ids(20)).to(device_type)
    grad = torch.randn(6, group.total_dim, device=device_type)
    gradients = []
    for one in (group, other):
        weights = torch.rand(len(bags.ids), generator=torch.Generator().manual_seed(1))
        weights = weights.to(device_type).requires_grad_()
        with one.accumulate() if one is group else torch.enable_grad():
            lookup(one, bags, weights).backward(grad)
        gradients.append(weights.grad)
    assert torch.equal(*gradients)


def test_held_rows_are_not_evicted(device_type):
    spec = TableSpec("t", 64, 2, initializer=Uniform(-1, 1))
    group = TableGroup([spec], [0], SGD(), device=device_type)

    def batch(first, n):
        ids = torch.arange(first, first + n)
        return Bags(ids, torch.arange(n + 1), n).to(device_type)

    with group.accumulate():
        lookup(group, batch(0, 40)).sum().backward()
    start = rows_by_id(group)
    lookup(group, batch(100, 64), learning_rate=0.5).sum().backward()
    rows = rows_by_id(group)
    assert set(range(40)) <= rows.keys()
    for id_ in range(40):
        assert torch.equal(rows[id_], start[id_] - 0.5)
    lookup(group, batch(200, 64)).sum().backward()
    assert rows_by_id(group).keys() == set(range(200, 264))


def test_a_graph_that_is_dropped_holds_nothing(device_type):
    group = _group(SGD(), device_type)
    bags = Bags.random(3, 6, random_ids(20)).to(device_type)
    with group.accumulate():
        out = lookup(group, bags)
    with pytest.raises(ValueError, match="the backward of 1 lookups has not run"):
        group.set_clock(5)
    del out
    gc.collect()
    group.set_clock(5)
    before = rows_by_id(group)
    empty = Bags(bags.ids[:0], torch.zeros(4, dtype=torch.int64, device=device_type), 1)
    lookup(group, empty).sum().backward()
    assert all(torch.equal(row, before[id_]) for id_, row in rows_by_id(group).items())


def test_an_error_within_ends_it(device_type):
    group = _group(SGD(), device_type)
    with pytest.raises(KeyError), group.accumulate():
        raise KeyError
    bags = Bags.random(3, 6, random_ids(20)).to(device_type)
    lookup(group, bags).sum().backward()
    assert group.optimizer_steps.tolist() == [1, 1]
