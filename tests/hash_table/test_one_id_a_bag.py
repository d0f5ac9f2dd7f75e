"""Large batches of one id a bag on a GPU give the same outputs, rows and states as on a CPU.

Such batches have their own kernels. Rows that are read once are pooled as the last to leave the L2
cache, and wide ones are copied in bulk. Narrow rows with one position are updated from shared
memory, by Adam with a warp each. Very large batches sort all positions, and update wide rows in
tiles.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.steps import contents, pooled_step
from torchrec_hkv.hash_table import (
    SGD,
    Adagrad,
    Adam,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

pytestmark = NEEDS_GPU

OPTIMIZERS = [SGD(), RowWiseAdagrad(eps=1e-8), Adagrad(eps=1e-8), Adam()]


def compare(dim, n, optimizer, repeated, device="cuda", hot=0, offsets=None, **of_step):
    """hot: positions of one id. offsets: None for one id a bag."""
    offsets = torch.arange(n + 1) if offsets is None else offsets
    rows = n * 5 // 4
    spec = TableSpec("t", 2 * rows, dim, initializer=Uniform(-1, 1))
    groups = [TableGroup([spec], [0], optimizer, device=at) for at in ("cpu", device)]
    for group in groups:
        ids = torch.arange(rows, device=group.device)
        group.find_or_insert(ids, torch.tensor([0, rows], device=group.device), 1)
    for _ in range(3):
        ids = torch.randperm(rows)[:n]
        ids[torch.randperm(n)[: int(n * repeated)]] = ids[: int(n * repeated)].clone()
        ids[torch.randperm(n)[:hot]] = ids[0].item()
        grad = torch.randn(n, dim)
        expected, out = (pooled_step(g, ids, offsets, n, grad, **of_step) for g in groups)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for expected, found in zip(*(contents(group, 1) for group in groups), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Below and above 2^17.
@pytest.mark.parametrize("n", [100_003, 200_003])
@pytest.mark.parametrize("dim", [4, 64, 100, 128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_updates(optimizer, dim, n):
    compare(dim, n, optimizer, repeated=0.05)


# Above the size from which rows leave the cache last, and positions are sorted.
MANY = (1 << 19) + 77


@pytest.mark.parametrize("dim", [8, 64, 100, 128])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(), RowWiseAdagrad(eps=1e-8), Adam()],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_pooling_of_many(optimizer, dim):
    compare(dim, MANY, optimizer, repeated=0.05)


# Runs of two positions and a long one; gradients have different scales.
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dim", [100, 128])
def test_sorted_rows_with_weights(dim, mean):
    weights = torch.rand(MANY) + 0.5
    compare(dim, MANY, RowWiseAdagrad(eps=1e-8), 0.05, hot=700, weights=weights, mean=mean)


# As many ids as bags, but not one in each bag.
@pytest.mark.parametrize("dim", [100, 128])
def test_bags_of_other_lengths(dim):
    lengths = torch.ones(MANY, dtype=torch.int64)
    some = torch.randperm(MANY // 2)[: MANY // 50]
    lengths[2 * some] = torch.randint(3, some.shape)
    lengths[2 * some + 1] = 2 - lengths[2 * some]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    compare(dim, MANY, RowWiseAdagrad(eps=1e-8), repeated=0.05, offsets=offsets)


@pytest.mark.parametrize("dim", [100, 128])
def test_pooling_of_ids_without_rows(dim):
    spec = TableSpec("t", 1 << 20, dim, initializer=Uniform(-1, 1))
    ids = torch.randint(1 << 18, (MANY,))
    outs = []
    for device in ("cpu", "cuda"):
        group = TableGroup([spec], [0], SGD(), device=device)
        there = torch.arange(1 << 17, device=device)
        group.find_or_insert(there, torch.tensor([0, len(there)], device=device), 1)
        offsets, anchor = torch.arange(MANY + 1, device=device), torch.empty(0, device=device)
        slots = group.find(ids.to(device), offsets, MANY)
        rate = torch.zeros((), device=device)
        outs.append(
            group.pooled_lookup(
                anchor, ids.to(device), offsets, None, slots, MANY, False, None, rate
            ).cpu()
        )
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
