"""Under torch.use_deterministic_algorithms two runs on a GPU give the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD, Adam
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU

GROUPS = {"one": [tt.LARGER[0]], "rank 64": [tt.LARGER[3]], "several": tt.LARGER[:3]}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(shapes, batch_size):
    bags = tt.random_bags(shapes, range(len(shapes)), batch_size, 10)
    bags.ids[torch.rand(bags.ids.numel()) < 0.3] = 17  # a hot id
    return bags.to("cuda")


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch_size", [50, 4000])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_and_gradients(name, batch_size, precision, weighted):
    shapes = GROUPS[name]
    features = range(len(shapes))
    group = TTGroup(shapes, precision=precision)
    cores = [[c.requires_grad_() for c in tt.random_cores(s, "cuda")] for s in shapes]
    flat = [core for own in cores for core in own]
    bags = draw(shapes, batch_size)
    kind = {"weights": bags.weights if weighted else None, "mean": weighted}
    grad = torch.randn(batch_size, group.total_dim, device="cuda")

    def run():
        out = group.lookup(flat, bags.ids, bags.offsets, batch_size, **kind)
        return [out.detach(), *torch.autograd.grad(out, flat, grad)]

    first = run()
    for _ in range(4):
        assert all(map(torch.equal, first, run()))
    torch.use_deterministic_algorithms(False)  # of the reference
    tables = [tt.dense_table(s, c) for s, c in zip(shapes, cores, strict=True)]
    reference = tt.reference_lookup(tables, features, bags, **kind)
    expected = [reference, *torch.autograd.grad(reference, flat, grad.double())]
    sizes = tt.magnitudes(shapes, features, bags, cores, grad, **kind)[: 1 + len(flat)]
    for one, other, size in zip(first, expected, sizes, strict=True):
        tt.assert_within(one, other, precision, size)


@pytest.mark.parametrize("name", GROUPS)
def test_training(name):
    shapes = GROUPS[name]
    group = TTGroup(shapes, optimizer=Adam(eps=0.1))
    start = [core for shape in shapes for core in tt.random_cores(shape, "cuda")]
    batches = [draw(shapes, 2000) for _ in range(3)]
    grad = torch.randn(2000, group.total_dim, device="cuda")
    rate = torch.tensor(0.05, device="cuda")

    def train():
        cores, states = [core.clone() for core in start], group.make_states("cuda")
        counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        anchor = torch.zeros(0, device="cuda", requires_grad=True)
        for bags in batches:
            out = group.lookup_fused(
                anchor, cores, states, counter, bags.ids, bags.offsets, 2000, rate
            )
            out.backward(grad)
        assert counter.item() == 3
        return cores

    first = train()
    assert not any(map(torch.equal, first, start))
    for _ in range(3):
        assert all(map(torch.equal, first, train()))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_gradients_of_any_size(scale):
    shape = tt.LARGER[0]
    group, cores = TTGroup([shape], optimizer=SGD()), tt.random_cores(shape, "cuda")
    bags = draw([shape], 300)
    grad = torch.randn(300, 64, device="cuda") * scale
    found = group.gradients(cores, grad, bags.ids, bags.offsets, 300)
    plain = group.gradients(cores, grad / scale, bags.ids, bags.offsets, 300)
    for one, other in zip(found, plain, strict=True):
        tt.assert_near(one.double() / scale, other.double(), 1e-6)


def test_cores_may_be_parameters():
    shape = tt.LARGER[2]
    cores = [torch.nn.Parameter(core) for core in tt.random_cores(shape, "cuda")]
    group, bags = TTGroup([shape]), draw([shape], 300)
    grad = torch.randn(300, shape.embedding_dim, device="cuda")
    first = group.gradients(cores, grad, bags.ids, bags.offsets, 300)
    again = group.gradients(cores, grad, bags.ids, bags.offsets, 300)
    assert all(map(torch.equal, first, again))


def test_a_gradient_that_is_not_finite_is_not_hidden():
    shape = tt.LARGER[0]
    group, cores = TTGroup([shape]), tt.random_cores(shape, "cuda")
    bags = draw([shape], 30)
    for bad in (float("nan"), float("inf")):
        grad = torch.randn(30, 64, device="cuda")
        grad[:, 5] = bad
        for gradient in group.gradients(cores, grad, bags.ids, bags.offsets, 30):
            assert not torch.isfinite(gradient).all()
