"""Over 50 steps, rows equal those of PyTorch's optimizers on the ids with gradients."""

import pytest
import torch

from tests.support.embeddings import make_embedding
from torchrec_hkv import HKVAdagrad, HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam

IDS, DIM, STEPS = 40, 12, 50


def batches(device, seed=0):
    """Ids with repetitions, and gradients.

    Gradients are multiples of 1/8, so that their sums are exact. Adam's first steps depend only on
    a gradient's sign, and would magnify the rounding error of a sum that should be 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(IDS, (4, 9), generator=generator).square() % IDS
        grads = (8 * torch.randn(4, 9, DIM, generator=generator)).round() / 8
        yield ids.to(device), grads.to(device)


def stepped(module, optimizer, ids, grads):
    loss = (module(ids) * grads).sum() + module(ids[:1]).sum() / 8  # two lookups
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rows_of(embedding, device):
    with torch.no_grad():
        return embedding(torch.arange(IDS, device=device)).cpu()


CASES = {
    "sgd": (
        lambda e: HKVOptimizer(e, lr=0.004),
        lambda p: torch.optim.SGD(p, lr=0.004),
    ),
    "adam": (
        lambda e: HKVAdamOptimizer(e, lr=0.02, betas=(0.8, 0.98)),
        lambda p: torch.optim.SparseAdam(p, lr=0.02, betas=(0.8, 0.98)),
    ),
    "adagrad": (
        lambda e: HKVAdagrad(e, lr=0.1, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_those_of_a_sparse_embedding(case, device_type):
    make_ours, make_theirs = CASES[case]
    actual = make_embedding(DIM, device=device_type)
    dense = torch.nn.Embedding(IDS, DIM, sparse=True, device=device_type)
    dense.weight.data.copy_(rows_of(actual, device_type))
    before = dense.weight.detach().cpu().clone()
    our_optimizer, their_optimizer = make_ours(actual), make_theirs(dense.parameters())
    for ids, grads in batches(device_type):
        stepped(actual, our_optimizer, ids, grads)
        stepped(dense, their_optimizer, ids, grads)
    expected = dense.weight.detach().cpu()
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(rows_of(actual, device_type), expected, rtol=0, atol=1e-6)


REGULARISED = {
    "sgd": (
        lambda e: HKVOptimizer(e, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
    ),
    "adam by row": (
        lambda e: HKVSparseAdam(e, lr=0.02, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    ),
    "adagrad": (
        lambda e: HKVAdagrad(e, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("case", REGULARISED)
def test_rows_equal_those_of_parameters_of_their_own(case, device_type):
    """A row without a gradient does not change and counts no step, like a parameter of its own."""
    make_ours, make_theirs = REGULARISED[case]
    embedding = make_embedding(DIM, device=device_type)
    rows = [
        torch.nn.Parameter(row.clone()) for row in rows_of(embedding, device_type).to(device_type)
    ]
    our_optimizer, their_optimizer = make_ours(embedding), make_theirs(rows)

    def lookup(ids):
        there, where = ids.unique(return_inverse=True)
        return torch.stack([rows[id] for id in there.tolist()])[where]

    for ids, grads in batches(device_type):
        stepped(embedding, our_optimizer, ids, grads)
        stepped(lookup, their_optimizer, ids, grads)
    expected = torch.stack([row.detach().cpu() for row in rows])
    torch.testing.assert_close(rows_of(embedding, device_type), expected, rtol=0, atol=1e-6)


def test_built_in_sgd_takes_the_modules_rate_and_decay(device_type):
    embedding = make_embedding(DIM, device=device_type, learning_rate=0.3, weight_decay=0.1)
    rows = rows_of(embedding, device_type)
    ids = torch.tensor([3, 5, 3], device=device_type)
    embedding(ids).sum().backward()
    embedding.apply_gradients()
    expected = rows.clone()
    for id, count in ((3, 2), (5, 1)):
        expected[id] -= 0.3 * (count + 0.1 * rows[id])
    torch.testing.assert_close(rows_of(embedding, device_type), expected, rtol=0, atol=1e-6)


def test_groups_have_learning_rates_of_their_own(device_type):
    first, second = (make_embedding(DIM, device=device_type, seed=seed) for seed in (1, 2))
    before = [rows_of(module, device_type) for module in (first, second)]
    groups = [{"params": [first], "lr": 0.5}, {"params": [second]}]
    optimizer = HKVOptimizer(groups, lr=0.25)
    ids = torch.arange(IDS, device=device_type)
    (first(ids).sum() + second(ids).sum()).backward()
    optimizer.step()
    for module, rows, rate in zip((first, second), before, (0.5, 0.25), strict=True):
        torch.testing.assert_close(rows_of(module, device_type), rows - rate)


def test_adam_decays_weights_as_that_of_a_dense_embedding(device_type):
    """If every id has a gradient in every step, both decay alike."""
    actual = make_embedding(DIM, device=device_type)
    dense = torch.nn.Embedding(IDS, DIM, device=device_type)
    dense.weight.data.copy_(rows_of(actual, device_type))
    before = dense.weight.detach().cpu().clone()
    our_optimizer = HKVAdamOptimizer(actual, lr=0.02, weight_decay=0.1)
    their_optimizer = torch.optim.Adam(dense.parameters(), lr=0.02, weight_decay=0.1)
    ids = torch.arange(IDS, device=device_type)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        grads = (8 * torch.randn(IDS, DIM, generator=generator)).round().to(device_type) / 8
        for module, optimizer in ((actual, our_optimizer), (dense, their_optimizer)):
            optimizer.zero_grad()
            (module(ids) * grads).sum().backward()
            optimizer.step()
    expected = dense.weight.detach().cpu()
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(rows_of(actual, device_type), expected, rtol=0, atol=1e-6)
