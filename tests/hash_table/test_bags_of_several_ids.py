"""Bags of several ids on a GPU under row-wise Adagrad: both update paths give the same bits.

One path copies rows that occur once in the batch to shared memory, where they share their bag's
gradient. If such rows were few in previous batches, the other path sorts all positions.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.steps import contents, pooled_step
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

BATCH = 2048
ROWS = 30_000
DEVICE = "cuda"


def make_group(dims):
    specs = [
        TableSpec(f"t{t}", 2 * ROWS, dim, initializer=Uniform(-1, 1)) for t, dim in enumerate(dims)
    ]
    group = TableGroup(specs, list(range(len(dims))), RowWiseAdagrad(eps=1e-8), device=DEVICE)
    number = len(dims)
    ids = torch.arange(ROWS, device=DEVICE).repeat(number)
    group.find_or_insert(ids, torch.arange(number + 1, device=DEVICE) * ROWS, 1)
    return group


# Tables of one width, narrow tables, and tables of different widths.
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (4, 20), (100, 4)])
@pytest.mark.parametrize("pooling", ["sum", "mean", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_give_the_same_bits(dims, pooling, dtype):
    groups = [make_group(dims) for _ in range(2)]
    lengths = torch.randint(8, (len(dims) * BATCH,), device=DEVICE)
    lengths[3], lengths[-1] = 200, 90  # more than a tile
    lengths[40:60] = 0
    n = int(lengths.sum())
    alone, repeated = torch.randperm(ROWS, device=DEVICE)[:n], torch.randint(300, (n,)).to(DEVICE)
    ids = alone.clone()
    ids[torch.randperm(n, device=DEVICE)[: n // 20]] = ids[: n // 20].clone()
    weights = torch.rand(n, device=DEVICE) if pooling == "weights" else None
    grad = torch.randn(BATCH, sum(dims), device=DEVICE).to(dtype)
    mean = pooling == "mean"
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    for group, before in zip(groups, (alone, repeated), strict=True):
        pooled_step(group, before, offsets, BATCH, torch.zeros_like(grad), None, mean)
    for group in groups:
        pooled_step(group, ids, offsets, BATCH, grad, weights, mean)
    for actual, other in zip(*(contents(group, len(dims)) for group in groups), strict=True):
        assert torch.equal(actual, other)  # zero gradients changed nothing
