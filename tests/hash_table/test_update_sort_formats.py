"""Rows are the same whatever format an update uses to sort slots and bags.

A GPU packs both into six bytes if they fit; otherwise a part of the bag goes beside the slot. The
test needs large tables and batches only for this.
"""

import pytest
import torch

from tests.support.batches import Bags, lookup
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform, initial_rows

DIM = 4
INITIAL = Uniform(-1, 1)


def step(group, bags, weights, grad):
    lookup(group, bags, weights, learning_rate=0.5).backward(grad)
    if grad.is_cuda:
        torch.cuda.synchronize()  # now the host knows the batch when the next one begins


def check(device, capacity, batch, weighted, kind, before):
    """Compares with the sum of gradients in double precision."""
    group = TableGroup(
        [TableSpec("t", capacity, DIM, initializer=INITIAL)], [0], SGD(), device=device
    )
    n = 2 * batch
    pool = torch.arange(4 * n, device=device)
    group.find_or_insert(pool, torch.tensor([0, len(pool)], device=device), 1)
    lengths = torch.randint(5, (batch,), device=device)
    lengths[-1] += 3 + max(0, n - int(lengths.sum()))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    n = int(offsets[-1])

    def draw(kind):
        ids = torch.randperm(len(pool), device=device)[:n]
        if kind == "few repeated":
            return torch.where(torch.rand(n, device=device) < 0.05, ids[0], ids)
        return ids if kind == "alone" else ids % 1000

    weights = torch.rand(n, device=device) if weighted else None
    grad = torch.randn(batch, DIM, device=device)
    # The previous batch decides the order in which rows are updated.
    step(group, Bags(draw(before), offsets, batch), weights, torch.zeros_like(grad))
    ids = draw(kind)
    step(group, Bags(ids, offsets, batch), weights, grad)
    rows, found = group.find_rows(pool, torch.tensor([0, len(pool)], device=device), 1)
    assert found.all()
    total = torch.zeros(len(pool), DIM, dtype=torch.float64, device=device)
    share = grad.double().repeat_interleave(lengths, 0)
    total.index_add_(0, ids, share if weights is None else share * weights[:, None].double())
    first = initial_rows(pool, DIM, table="t", initializer=INITIAL).double()
    torch.testing.assert_close(rows.double(), first - 0.5 * total, rtol=1e-4, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["alone", "repeated"])
@pytest.mark.parametrize("kind", ["alone", "few repeated", "repeated"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_more_than_16_bits(device_type, kind, before, weighted):
    check(torch.device(device_type), 2_000_000, 150_000, weighted, kind, before)


@needs_gpu
@pytest.mark.parametrize("before", ["alone", "repeated"])
@pytest.mark.parametrize("kind", ["few repeated", "repeated"])
def test_slots_and_positions_of_more_than_48_bits(kind, before):
    check(torch.device("cuda"), 1 << 27, 1 << 20, True, kind, before)
