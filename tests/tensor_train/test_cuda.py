"""What only a GPU has: graphs, no waits, large batches, ids outside of their tables, streams."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU, no_waits
from tests.tensor_train.test_lookup import LARGER
from torchrec_hkv.hash_table import SGD, Adam
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU

RATE = 0.05
GROUPS = {"one": [LARGER[0]], "four cores": [LARGER[2]], "several": LARGER[:3]}


class Trained:
    """Cores with what trains them."""

    def __init__(self, group: TTGroup, cores: list[torch.Tensor]) -> None:
        self.group, self.cores = group, cores
        self.states = group.make_states("cuda")
        self.counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rate = torch.tensor(RATE, device="cuda")
        self.anchor = torch.zeros(0, device="cuda", requires_grad=True)

    def step(self, bags: tt.Bags, grad: torch.Tensor, **kind) -> torch.Tensor:
        out = self.group.lookup_fused(
            self.anchor, self.cores, self.states, self.counter,
            bags.ids, bags.offsets, bags.batch_size, self.rate, **kind,
        )  # fmt: skip
        out.backward(grad)
        return out.detach()


def draw(shapes, batch_size=40, length=5) -> tt.Bags:
    """Bags of one length."""
    ids = [torch.randint(0, s.num_embeddings, (batch_size * length,)) for s in shapes]
    offsets = torch.arange(0, len(shapes) * batch_size * length + 1, length)
    all_ids = torch.cat(ids)
    return tt.Bags(all_ids, offsets, torch.randn(all_ids.numel()), batch_size).to("cuda")


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch_size", [40, 5000])  # of more ids than one cluster sorts
def test_captured_step_does_what_an_eager_one_does(name, batch_size):
    shapes = GROUPS[name]
    group = TTGroup(shapes, optimizer=Adam(eps=0.1))
    cores = [core for shape in shapes for core in tt.random_cores(shape, "cuda")]
    captured = Trained(group, cores)
    eager = Trained(group, [core.clone() for core in cores])
    static = draw(shapes, batch_size)
    grad = torch.randn(batch_size, group.total_dim, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = tt.Bags(static.ids.clone(), static.offsets, static.weights, batch_size)
        captured.step(static, grad)
    torch.cuda.current_stream().wait_stream(side)
    eager.step(first, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.step(static, grad)
    for _ in range(3):
        bags = draw(shapes, batch_size)
        static.ids.copy_(bags.ids)
        graph.replay()
        tt.assert_near(out, eager.step(bags, grad))
        for one, other in zip(captured.cores, eager.cores, strict=True):
            tt.assert_near(one, other, 2e-5)
    assert captured.counter.item() == 4


def test_capture_of_cores_that_were_not_used_is_refused():
    shape = LARGER[0]
    group, bags = TTGroup([shape]), draw([shape])
    cores = tt.random_cores(shape, "cuda")
    group.lookup(cores, bags.ids, bags.offsets, 40)
    others = [core.clone() for core in cores]
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"the cores of this group .* were not used before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        group.lookup(others, bags.ids, bags.offsets, 40)
    torch.cuda.synchronize()
    again = group.lookup(others, bags.ids, bags.offsets, 40)
    tt.assert_near(again, group.lookup(cores, bags.ids, bags.offsets, 40), 1e-6)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch_size", [40, 6000])
def test_warm_steps_do_not_wait(name, batch_size):
    shapes = GROUPS[name]
    group = TTGroup(shapes, optimizer=SGD())
    cores = [core for shape in shapes for core in tt.random_cores(shape, "cuda")]
    trained = Trained(group, cores)
    leaves = [core.clone().requires_grad_() for core in cores]
    batches = [draw(shapes, batch_size) for _ in range(3)]
    grad = torch.randn(batch_size, group.total_dim, device="cuda")
    weights = [bags.weights.clone().requires_grad_() for bags in batches]

    def steps(bags, weight):
        args = (bags.ids, bags.offsets, batch_size)
        trained.step(bags, grad, mean=True)
        trained.step(bags, grad, weights=weight)
        group.lookup(leaves, *args).backward(grad)
        if len(shapes) == 1:
            out = group.lookup(leaves, *args, pooled=False)
            out.backward(torch.ones_like(out))

    steps(batches[0], weights[0])
    torch.cuda.synchronize()
    with no_waits():
        for bags, weight in zip(batches[1:], weights[1:], strict=True):
            steps(bags, weight)
    assert all(weight.grad is not None for weight in weights)


def rows_by_slices(shape, cores, ids):
    """float64 rows of ids, slice by slice: also of tables that are too large to be made dense."""
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
        (LARGER[0], 5000),  # more ids than one cluster sorts
        (LARGER[2], 13_000),  # nearly as many as there are threads on the largest devices
        (LARGER[0], 20_000),  # more than that
        (TTShape(8 * 10**9, 8, (2000, 2000, 2000), (2, 2, 2), (3, 3)), 50),  # keys past 32 bits
        (TTShape(8 * 10**9, 8, (2000, 2000, 2000), (2, 2, 2), (3, 3)), 5000),
    ],
    ids=["ids", "threads", "many", "keys", "both"],
)
def test_large_index(shape, batch_size):
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    bags = draw([shape], batch_size, 8)
    bags.ids[: batch_size // 2] = bags.ids[0]  # one that repeats
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


@pytest.mark.parametrize("rank", [32, 64])
def test_large_batch_of_bfloat16_cores(rank):
    """As of float32 cores of the same values: both have kernels of their own for so many ids."""
    shape = TTShape(11_000, 64, (20, 22, 25), (4, 4, 4), (rank, rank))
    bags = draw([shape], 2**15, 8)
    cores = [c.requires_grad_() for c in tt.random_cores(shape, "cuda", torch.bfloat16)]
    wide = [core.detach().float().requires_grad_() for core in cores]
    args = (bags.ids, bags.offsets, 2**15)
    out, expected = (TTGroup([shape]).lookup(of, *args) for of in (cores, wide))
    tt.assert_near(out, expected)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, wide, grad)
    for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
        tt.assert_near(one, other, 2**-8)


@pytest.mark.parametrize("batch_size", [6, 6000])
def test_ids_outside_are_zeros_without_gradient_and_counted(batch_size):
    shape = LARGER[1]
    group = TTGroup([shape], optimizer=SGD())
    bags = draw([shape], batch_size)
    for at, bad in ((3, -1), (7, shape.num_embeddings), (8, 2**62), (20, -(2**63))):
        bags.ids[at] = bad
    inside = (bags.ids >= 0) & (bags.ids < shape.num_embeddings)
    assert int((~inside).sum()) == 4
    cores = tt.random_cores(shape, "cuda")
    table = tt.dense_table(shape, cores)
    rows = table[bags.ids.where(inside, 0)] * inside[:, None]
    args = (bags.ids, bags.offsets, batch_size)
    tt.assert_near(group.lookup(cores, *args, pooled=False), rows)
    assert group.outside("cuda") == 4
    weights = bags.weights.clone().requires_grad_()
    out = group.lookup(cores, *args, weights=weights)
    tt.assert_near(out, (rows * bags.weights[:, None]).reshape(batch_size, 5, -1).sum(dim=1))
    grad = torch.randn_like(out)
    out.backward(grad)
    tt.assert_near(weights.grad, (rows * grad.repeat_interleave(5, 0)).sum(dim=1))
    leaves = [core.clone().requires_grad_() for core in cores]
    actual = torch.autograd.grad(group.lookup(leaves, *args), leaves, grad)
    only = tt.Bags(
        bags.ids[inside],
        torch.cat([inside.new_zeros(1).long(), inside.cumsum(0)])[bags.offsets],
        bags.weights[inside],
        batch_size,
    )
    expected = tt.reference_lookup([tt.dense_table(shape, leaves)], [0], only)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for one, other in zip(actual, wanted, strict=True):
        tt.assert_near(one, other, 2e-5)


def test_weights_gradient_of_tables_of_different_dims():
    shapes, features = LARGER[:3], [1, 0, 2, 1]
    cores = [tt.random_cores(shape, "cuda") for shape in shapes]
    bags = tt.random_bags(shapes, features, 15).to("cuda")
    weights = bags.weights.requires_grad_()
    out = TTGroup(shapes, features).lookup(
        [core for own in cores for core in own], bags.ids, bags.offsets, 15,
        weights=weights, mean=True,
    )  # fmt: skip
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    expected = tt.reference_lookup(tables, features, bags, weights=weights, mean=True)
    grad = torch.randn_like(out)
    out.backward(grad)
    tt.assert_near(weights.grad, torch.autograd.grad(expected, weights, grad.double())[0])


def test_many_lists_of_cores_take_turns():
    """More than a group keeps, so that some are made anew; a gradient is of its own cores."""
    shape = LARGER[2]
    group, bags = TTGroup([shape]), draw([shape])
    lists = [[c.requires_grad_() for c in tt.random_cores(shape, "cuda")] for _ in range(11)]
    outs = [group.lookup(cores, bags.ids, bags.offsets, 40) for cores in lists]
    grad = torch.randn_like(outs[0])
    for cores, out in zip(lists, outs, strict=True):
        expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
        tt.assert_near(out, expected)
        wanted = torch.autograd.grad(expected, cores, grad.double())
        for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
            tt.assert_near(one, other, 2e-5)


@pytest.mark.parametrize("batch_size", [3000, 6000])
def test_streams_take_turns(batch_size):
    """Steps on two streams that do not wait for each other: the group's buffers are in order."""
    shape = LARGER[2]
    group = TTGroup([shape])
    cores = [core.requires_grad_() for core in tt.random_cores(shape, "cuda")]
    detached = [core.detach() for core in cores]
    batches = [draw([shape], batch_size) for _ in range(6)]
    grad = torch.randn(batch_size, shape.embedding_dim, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for at, bags in enumerate(batches):
        with torch.cuda.stream(streams[at % 2]):
            found.append(group.gradients(detached, grad, bags.ids, bags.offsets, batch_size))
    torch.cuda.synchronize()
    for bags, gradients in zip(batches, found, strict=True):
        expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
        wanted = torch.autograd.grad(expected, cores, grad.double())
        for one, other in zip(gradients, wanted, strict=True):
            tt.assert_near(one, other, 2e-5)


@pytest.mark.parametrize("shape", [LARGER[0], LARGER[3]], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_ids_a_prefix(shape, precision, weighted):
    """So many that the last core, and its gradient, are kept by each block."""
    batch_size = 20_000
    bags = draw([shape], batch_size, 14)
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
    # Flags of slices: of some that no id has.
    some = bags.ids % shape.p[-1] != 3
    alone = torch.where(some, bags.ids, bags.ids + 1) % shape.num_embeddings
    flat = group.flat_gradients([c.detach() for c in cores], grad, alone, *args[1:])
    flags = torch.zeros(shape.p[-1], device="cuda")
    flags[alone % shape.p[-1]] = 1
    assert torch.equal(flat[-shape.p[-1] :], flags)


@pytest.mark.parametrize("shape", LARGER, ids=str)
def test_precisions_are_two(shape):
    cores = tt.random_cores(shape, "cuda")
    bags = draw([shape])
    expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
    errors = {}
    for precision in ("fp32", "tf32"):
        group = TTGroup([shape], precision=precision)
        out = group.lookup(cores, bags.ids, bags.offsets, bags.batch_size)
        errors[precision] = float((out - expected).norm() / expected.norm())
    assert errors["fp32"] < 1e-5 < errors["tf32"] < 1e-3


def test_gradient_at_an_odd_address():
    shape = LARGER[0]
    cores = tt.random_cores(shape, "cuda")
    bags, group = draw([shape]), TTGroup([shape])
    memory = torch.randn(40 * 64 + 1, device="cuda")
    grad = memory[1:].view(40, 64)
    assert grad.data_ptr() % 16 != 0
    args = (bags.ids, bags.offsets, 40)
    odd = group.gradients(cores, grad, *args)
    for one, other in zip(odd, group.gradients(cores, grad.clone(), *args), strict=True):
        tt.assert_near(one, other, 1e-6)


def test_refusals():
    shape = LARGER[0]
    group, bags = TTGroup([shape]), draw([shape])
    cores = tt.random_cores(shape, "cuda")
    args = (bags.ids, bags.offsets, 40)
    index = group.sort(*args)
    with pytest.raises(ValueError, match=r"index must have .* sort the batch with the weights"):
        group.lookup(cores, *args, weights=bags.weights, index=index)
    with pytest.raises(ValueError, match="cores must be on cuda:0, but is on cpu"):
        group.lookup([core.cpu() for core in cores], *args)
    high = TTShape(10**6, 512, (1000, 1000), (16, 32), (300,))
    assert math.prod(high.p) == 10**6
    with pytest.raises(ValueError, match="table 'table_0' has rank 300, but on a GPU"):
        TTGroup([high]).sort(*args)
