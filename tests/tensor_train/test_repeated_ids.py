"""Repeated ids: gradients of runs of any length, which work partitions may cut anywhere."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTGroup, TTShape

#: Lengths around 32, 128 and 512 neighbours, and across several of these.
LENGTHS = [1, 2, 31, 32, 33, 1, 1, 64, 127, 128, 129, 5, 255, 256, 511, 512, 513, 2, 1025, 1, 3000]
ODD = TTShape(700, 15, (28, 25), (5, 3), (7,))
WIDE = TTShape(1000, 160, (10, 10, 10), (4, 8, 5), (8, 8))


def check(shapes, ids, offsets, batch_size, device, weighted):
    bags = tt.Bags(ids, offsets, torch.rand(ids.numel()) + 0.5, batch_size).to(device)
    features = range(len(shapes))
    cores = [[c.requires_grad_() for c in tt.random_cores(s, device)] for s in shapes]
    flat = [core for own in cores for core in own]
    weights = bags.weights if weighted else None
    out = TTGroup(shapes).lookup(
        flat, bags.ids, bags.offsets, batch_size, weights=weights, mean=weighted
    )
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    reference = tt.reference_lookup(tables, features, bags, weights=weights, mean=weighted)
    tt.assert_near(out, reference)
    grad = torch.rand_like(out) + 0.5  # equal signs, so that no sum is small by cancellation
    expected = torch.autograd.grad(reference, flat, grad.double())
    sizes = tt.magnitudes(shapes, features, bags, cores, grad, weights=weights, mean=weighted)[
        1 : 1 + len(flat)
    ]
    for one, other, size in zip(torch.autograd.grad(out, flat, grad), expected, sizes, strict=True):
        tt.assert_near(one, other, magnitude=size)


@pytest.mark.parametrize("shape", [tt.LARGER[0], tt.LARGER[1], tt.LARGER[2], ODD, WIDE], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("times", [1, 4])
def test_runs_of_many_lengths(device_type, shape, weighted, times):
    """With few ids and, four times over, with more ids than one cluster of blocks sorts on a
    GPU."""
    torch.manual_seed(7)
    chosen = torch.randperm(shape.num_embeddings)[: len(LENGTHS)]
    ids = chosen.repeat_interleave(torch.tensor(LENGTHS) * times)
    ids = torch.cat([ids, ids[:3]])  # bags of 4
    ids = ids[: ids.numel() // 4 * 4][torch.randperm(ids.numel() // 4 * 4)]
    offsets = torch.arange(0, ids.numel() + 1, 4)
    check([shape], ids, offsets, ids.numel() // 4, device_type, weighted)


@pytest.mark.parametrize("length", [200, 9000])
def test_tables_of_different_dims(device_type, length):
    shapes = [tt.LARGER[1], WIDE, ODD]
    parts = [torch.randint(0, 5, (length,)).square() for _ in shapes]
    offsets = torch.arange(0, 3 * length + 1, 2)
    check(shapes, torch.cat(parts), offsets, length // 2, device_type, True)
