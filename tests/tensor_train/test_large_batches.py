"""Batches with many ids or large keys use other GPU kernels, with equal results."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU

#: Row factors of tables of different sizes.
SIZES = [(100, 110, 120), (10, 12, 14), (90, 60, 80), (8, 4, 8)]


def rows_by_slices(shape, cores, ids):
    """float64 rows of ids, slice by slice: works for tables too large for a dense copy."""
    digits = []
    for p in reversed(shape.p):
        digits.append(ids % p)
        ids = ids // p
    slices = [
        core.double().reshape(shape.core_shape(k))[digit]
        for k, (core, digit) in enumerate(zip(cores, reversed(digits), strict=True))
    ]
    rows = slices[0][:, 0]
    for middle in slices[1:-1]:
        rows = torch.einsum("nur,nrvs->nuvs", rows, middle).flatten(1, 2)
    last = slices[-1].reshape(rows.shape[0], shape.q[-1], -1)
    return torch.einsum("nur,nvr->nuv", rows, last).flatten(1)


@pytest.mark.parametrize(
    ("shape", "batch_size"),
    [
        (tt.LARGER[0], 5000),  # more ids than one cluster sorts
        (tt.LARGER[2], 13_000),  # nearly as many as the largest devices have threads
        (tt.LARGER[0], 20_000),  # more than the devices have threads
        (TTShape(8 * 10**9, 8, (2000, 2000, 2000), (2, 2, 2), (3, 3)), 50),  # keys past 32 bits
        (TTShape(8 * 10**9, 8, (2000, 2000, 2000), (2, 2, 2), (3, 3)), 5000),
    ],
    ids=["ids", "threads", "many", "keys", "both"],
)
def test_large_index(shape, batch_size):
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    bags = tt.even_bags([shape], batch_size, 8)
    bags.ids[: batch_size // 2] = bags.ids[0]  # a repeated id
    out = TTGroup([shape]).lookup(
        cores, bags.ids, bags.offsets, batch_size, weights=bags.weights, mean=True
    )
    rows = rows_by_slices(shape, cores, bags.ids) * bags.weights.double()[:, None]
    expected = rows.reshape(batch_size, 8, -1).mean(dim=1)
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, cores, grad.double())
    for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
        tt.assert_near(one, other, 2e-5)


#: Orders of ids in a batch.
ORDERS = {
    "uniform": lambda rows, size: torch.randint(0, rows, (size,)),
    "half of them one id": lambda rows, size: torch.where(
        torch.rand(size) < 0.5, rows - 1, torch.randint(0, rows, (size,))
    ),
    "backwards": lambda rows, size: -torch.arange(size) * (rows // size + 1) % rows,
}


@pytest.mark.parametrize(
    "p",
    [(4, 4, 4), (16, 16, 15), (100, 90, 100), (300, 300, 300), (1600, 1600, 1600)],
    ids=["7 bits", "12", "20", "25", "32"],
)
@pytest.mark.parametrize("size", [140_001, 14 * 10_240, 14 * 10_240 + 1, 400_000])
@pytest.mark.parametrize("order", ORDERS)
def test_sorts_of_large_batches(p, size, order):
    """Sorts by one to four digits, in tiles of 10,240."""
    shape = TTShape(math.prod(p) - 1, 8, p, (2, 2, 2), (3, 3))  # the last id is out of range
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    ids = ORDERS[order](shape.num_embeddings, size).to("cuda")
    offsets = torch.tensor([0, size // 2, size], device="cuda")
    ids[::1000] = math.prod(p) - 1
    outside = ids == math.prod(p) - 1
    out = TTGroup([shape]).lookup(cores, ids, offsets, 2, pooled=False)
    expected = rows_by_slices(shape, cores, ids).where(~outside[:, None], 0.0)
    tt.assert_near(out, expected)
    grad = torch.rand_like(out) + 0.5
    wanted = torch.autograd.grad(expected, cores, grad.double())
    for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
        tt.assert_near(one, other, 2e-5)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("size", [2000, 12_000])
def test_prefixes_of_some_tables_have_more_ids(size, precision):
    """Prefixes of a small table have many ids beside large tables, whose prefixes have about
    one."""
    shapes = [TTShape(math.prod(p), 64, p, (4, 4, 4), (32, 32)) for p in SIZES]
    cores = [[c.requires_grad_() for c in tt.random_cores(s, "cuda")] for s in shapes]
    flat = [core for own in cores for core in own]
    ids = [torch.randint(0, s.num_embeddings, (size,), device="cuda") for s in shapes]
    offsets = torch.arange(len(shapes) * size // 10 + 1, device="cuda") * 10
    group = TTGroup(shapes, precision=precision)
    out = group.lookup(flat, torch.cat(ids), offsets, size // 10)
    rows = [rows_by_slices(s, c, i) for s, c, i in zip(shapes, cores, ids, strict=True)]
    expected = torch.cat([r.reshape(size // 10, 10, -1).sum(dim=1) for r in rows], dim=1)
    bound = 1e-3 if precision == "tf32" else 1e-5
    assert float((out - expected).detach().norm() / expected.detach().norm()) < bound
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, flat, grad.double())
    for one, other in zip(torch.autograd.grad(out, flat, grad), wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < bound


@pytest.mark.parametrize("rank", [32, 64])
def test_large_batch_of_bfloat16_cores(rank):
    """Equals float32 cores of the same values; each type has separate kernels for so many ids."""
    shape = TTShape(11_000, 64, (20, 22, 25), (4, 4, 4), (rank, rank))
    bags = tt.even_bags([shape], 2**15, 8)
    cores = [c.requires_grad_() for c in tt.random_cores(shape, "cuda", torch.bfloat16)]
    wide = [core.detach().float().requires_grad_() for core in cores]
    args = (bags.ids, bags.offsets, 2**15)
    out, expected = (TTGroup([shape]).lookup(of, *args) for of in (cores, wide))
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, wide, grad)
    for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
        tt.assert_near(one, other, 2**-8)


@pytest.mark.parametrize("shape", [tt.LARGER[0], tt.LARGER[3]], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_ids_a_prefix(shape, precision, weighted):
    """Prefixes have so many ids that each block keeps the last core and its gradient."""
    batch_size = 20_000
    bags = tt.even_bags([shape], batch_size, 14)
    bags.ids[:1000] = bags.ids[0]
    weights = bags.weights if weighted else None
    group = TTGroup([shape], optimizer=SGD(), precision=precision)
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    rows = tt.dense_table(shape, cores)[bags.ids]
    if weighted:
        rows = rows * bags.weights.double()[:, None]
    expected = rows.reshape(batch_size, 14, -1).sum(dim=1)
    args = (bags.ids, bags.offsets, batch_size)
    out = group.lookup(cores, *args, weights=weights)
    tt.assert_within(out, expected, precision)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, cores, grad.double())
    sizes = tt.magnitudes([shape], [0], bags, [cores], grad, weights=weights)[1:4]
    gradients = torch.autograd.grad(out, cores, grad)
    for one, other, size in zip(gradients, wanted, sizes, strict=True):
        tt.assert_within(one, other, precision, size)
    # Flags of slices include slices that no id has.
    some = bags.ids % shape.p[-1] != 3
    alone = torch.where(some, bags.ids, bags.ids + 1) % shape.num_embeddings
    flat = group.flat_gradients([c.detach() for c in cores], grad, alone, *args[1:])
    flags = torch.zeros(shape.p[-1], device="cuda")
    flags[alone % shape.p[-1]] = 1
    assert torch.equal(flat[-shape.p[-1] :], flags)
