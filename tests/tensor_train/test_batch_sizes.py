"""The number of ids and their distribution select kernels; all of them give the same results."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU

SHAPE = TTShape(209_990, 64, (60, 70, 50), (4, 4, 4), (32, 32))
OTHER = TTShape(5_000, 64, (20, 10, 25), (4, 4, 4), (32, 32))

#: Below, at and above the sizes that select other kernels.
SIZES = [1, 9, 300, 1024, 1025, 5000, 2**14, 2**14 + 1, 100_000, 2**18 - 1, 2**18]


def power_law(rows: int, size: int) -> torch.Tensor:
    """Ids scattered over the rows; the most frequent of 1000 occurs some 150 times."""
    ranks = (torch.rand(size) * (rows**-0.2 - 1) + 1).pow(-5).long().clamp(1, rows)
    return ranks * 104_729 % rows


SPREADS = {
    "uniform": lambda rows, size: torch.randint(0, rows, (size,)),
    "power law": power_law,
    "one id": lambda rows, size: torch.full((size,), rows // 3),
    "neighbours": lambda rows, size: torch.randint(0, min(rows, 200), (size,)),
    "in order": lambda rows, size: torch.arange(size) % rows,
}


def bags_of(ids: torch.Tensor, features: int = 1) -> tt.Bags:
    """Bags of random lengths, most of them up to 20."""
    batch_size = max(1, ids.numel() // features // 10)
    ends = torch.randint(0, ids.numel() + 1, (features * batch_size + 1,)).sort().values
    ends[0], ends[-1] = 0, ids.numel()
    return tt.Bags(ids, ends, torch.rand(ids.numel()) + 0.5, batch_size).to("cuda")


def flags_of(shape: TTShape, ids: torch.Tensor) -> torch.Tensor:
    flags = []
    for p in reversed(shape.p):
        flag = torch.zeros(p, device=ids.device)
        flag[ids % p] = 1
        flags.insert(0, flag)
        ids = ids // p
    return torch.cat(flags)


def check(shapes, bags, precision, **kind):
    features = range(len(shapes))
    group = TTGroup(shapes, precision=precision)
    cores = [[c.requires_grad_() for c in tt.random_cores(s, "cuda")] for s in shapes]
    flat = [core for own in cores for core in own]
    args = (bags.ids, bags.offsets, bags.batch_size)
    out = group.lookup(flat, *args, **kind)
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    expected = tt.reference_lookup(tables, features, bags, **kind)
    sizes = tt.magnitudes(shapes, features, bags, cores, torch.ones_like(out), **kind)
    tt.assert_within(out, expected, precision, sizes[0])
    grad = torch.rand_like(out) + 0.5  # equal signs, so that no sum is small by cancellation
    sizes = tt.magnitudes(shapes, features, bags, cores, grad, **kind)[1 : 1 + len(flat)]
    wanted = torch.autograd.grad(expected, flat, grad.double())
    for one, other, size in zip(torch.autograd.grad(out, flat, grad), wanted, sizes, strict=True):
        tt.assert_within(one, other, precision, size)
    return group, [core.detach() for core in flat], grad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_any_number_of_ids(size, spread, precision):
    bags = bags_of(SPREADS[spread](SHAPE.num_embeddings, size))
    group, cores, grad = check([SHAPE], bags, precision)
    args = (grad, bags.ids, bags.offsets, bags.batch_size)
    elements = sum(core.numel() for core in cores)
    for _ in range(2):  # the first call leaves nothing behind
        flat = group.flat_gradients(cores, *args)
        assert torch.equal(flat[elements:], flags_of(SHAPE, bags.ids))


@pytest.mark.parametrize("size", [40, 1500, 20_000])
@pytest.mark.parametrize("spread", ["uniform", "power law"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("kind", ["weighted", "mean", "rows"])
def test_tables_of_one_class(size, spread, precision, kind):
    shapes = [OTHER, SHAPE, OTHER]
    ids = torch.cat([SPREADS[spread](s.num_embeddings, size) for s in shapes])
    bags = bags_of(ids, 3)
    # Each feature has ids of one table.
    for feature, shape in enumerate(shapes):
        begin, end = (int(bags.offsets[(feature + i) * bags.batch_size]) for i in (0, 1))
        bags.ids[begin:end] %= shape.num_embeddings
    if kind == "rows":
        check([SHAPE], bags_of(ids % SHAPE.num_embeddings), precision, pooled=False)
    else:
        check(shapes, bags, precision, weights=bags.weights, mean=kind == "mean")


@pytest.mark.parametrize("size", [1000, 16_000, 200_000])
@pytest.mark.parametrize("p", [(1100, 5, 40), (40, 5, 1100)], ids=str)
def test_more_slices_than_a_block_keeps_flags_of(size, p):
    """A block does not keep flags for this many slices, but does for the table beside it."""
    wide = TTShape(math.prod(p), 64, p, (4, 4, 4), (32, 32))
    shapes = [OTHER, wide, OTHER]
    bags = bags_of(torch.randint(0, wide.num_embeddings, (size,)), 3)
    of_feature = []
    for feature, shape in enumerate(shapes):
        begin, end = (int(bags.offsets[(feature + i) * bags.batch_size]) for i in (0, 1))
        bags.ids[begin:end] %= shape.num_embeddings
        of_feature.append(bags.ids[begin:end])
    group, cores, grad = check(shapes, bags, "tf32")
    flat = group.flat_gradients(cores, grad, bags.ids, bags.offsets, bags.batch_size)
    flags = [flags_of(shape, ids) for shape, ids in zip(shapes, of_feature, strict=True)]
    assert torch.equal(flat[sum(core.numel() for core in cores) :], torch.cat(flags))


@pytest.mark.parametrize("shape", [SHAPE, TTShape(209_990, 64, (60, 70, 50), (4, 4, 4), (64, 64))])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_ids_that_occur_so_often(shape, precision, times):
    """In a large batch, some ids that occur twice are processed as two ids."""
    chosen = torch.randperm(shape.num_embeddings)[: 2**18 // times]
    ids = chosen.repeat_interleave(times)
    check([shape], bags_of(ids[torch.randperm(ids.numel())]), precision)


#: Not all column factors are 4: some shapes have their own kernels.
COLUMNS = [
    TTShape(20_000, 32, (25, 20, 40), (4, 2, 4), (32, 32)),
    TTShape(20_000, 48, (25, 20, 40), (4, 3, 4), (32, 32)),
    TTShape(20_000, 16, (25, 20, 40), (2, 2, 4), (32, 32)),
    TTShape(20_000, 120, (25, 20, 40), (5, 3, 8), (64, 64)),
    TTShape(20_000, 32, (40, 13, 40), (4, 2, 4), (128, 128)),
    TTShape(20_000, 24, (25, 20, 40), (4, 3, 2), (32, 32)),
]


@pytest.mark.parametrize("size", [300, 6000, 2**14 + 1, 100_000, 2**18 + 8])
@pytest.mark.parametrize("shape", COLUMNS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_other_columns(size, shape, precision):
    bags = bags_of(SPREADS["uniform" if size % 2 else "power law"](shape.num_embeddings, size))
    check([shape], bags, precision)
    if size == 6000:
        check([shape], bags, precision, weights=bags.weights, mean=True)
        ids = torch.cat([bags.ids, bags.ids]).cpu()
        check([shape, shape], bags_of(ids, 2), precision)


@pytest.mark.parametrize("times", [127, 128, 129, 130, 700])
@pytest.mark.parametrize("shape", [SHAPE, TTShape(64, 64, (4, 4, 4), (4, 4, 4), (16, 16))], ids=str)
def test_an_id_of_a_small_batch_that_repeats(times, shape):
    """Small batches sort up to 128 neighbours of a 256th of the ids in a different way than more of
    them."""
    ids = torch.randint(0, shape.num_embeddings, (6000,))
    # Middle slices are far from that of id 0.
    middle = torch.randint(shape.p[1] // 2, shape.p[1], ids.shape)
    head, last = ids // shape.p[2] // shape.p[1], ids % shape.p[2]
    ids = ((head * shape.p[1] + middle) * shape.p[2] + last) % shape.num_embeddings
    ids[torch.randperm(6000)[:times]] = 0
    check([shape], bags_of(ids), "fp32")


@pytest.mark.parametrize("size", [1500, 2**14, 2**14 + 1, 100_000])
@pytest.mark.parametrize("spread", ["uniform", "power law", "one id"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_deterministic(size, spread, precision):
    bags = bags_of(SPREADS[spread](SHAPE.num_embeddings, size))
    cores = [core.requires_grad_() for core in tt.random_cores(SHAPE, "cuda")]
    group = TTGroup([SHAPE], precision=precision)
    grad = torch.randn(bags.batch_size, 64, device="cuda")

    def run():
        out = group.lookup(cores, bags.ids, bags.offsets, bags.batch_size)
        return [out.detach(), *torch.autograd.grad(out, cores, grad)]

    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, plain, strict=True):
        assert float((one - other).norm() / other.norm()) < (2e-3 if precision == "tf32" else 1e-5)
