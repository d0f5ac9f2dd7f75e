"""Lookups whose features differ in their numbers of bags equal EmbeddingBag in float64."""

import pytest
import torch

from tests.support.batches import random_ids, rate, rows_by_id
from tests.support.gpu import needs_gpu
from tests.support.ragged_batches import RaggedBatch, look_up, reference_step
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

OPTIMIZERS = {"sgd": SGD(), "rowwise_adagrad": RowWiseAdagrad(eps=1e-6)}
# On a GPU: rows with a fast path, read value by value, wider than a warp, and all at once.
DIMS = [(8, 64, 128), (1, 3, 6), (260, 132), (4, 7, 200)]
BAGS = [[4, 1, 6, 9], [0, 3, 0, 5], [2, 2, 2, 2], [0, 0, 0, 0], [70, 0, 1, 300]]


def make_groups(dims, optimizer, device):
    """A group of all tables, whose first table has two features, and a group for each feature."""
    specs = [TableSpec(f"t{i}", 600, dim, initializer=Uniform(-1, 1)) for i, dim in enumerate(dims)]
    features = [*range(len(dims)), 0]
    return TableGroup(specs, features, optimizer, device), specs, features


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("bags", BAGS, ids=str)
@pytest.mark.parametrize("mean", [False, True])
def test_against_embedding_bag(device_type, dims, bags, mean):
    """Outputs and gradients of rows and weights, in float64. Ids are rows 0 to 39."""
    torch.manual_seed(sum(bags) + sum(dims))
    group, specs, features = make_groups(dims, SGD(), device_type)
    bags = bags[: len(features)]
    batch = RaggedBatch(bags, torch.arange(40), device_type)
    everything = torch.arange(40, device=device_type).repeat(len(features))
    ends = torch.arange(len(features) + 1, device=device_type) * 40
    group.find_or_insert(everything, ends, 1)
    names = range(40)
    rows = [
        torch.stack([rows_by_id(group, t)[i] for i in names]).double() for t in range(len(dims))
    ]
    weights = batch.weights.clone().requires_grad_()
    out = look_up(group, batch.ids, batch.offsets, weights, mean, bags)
    size = sum(number * specs[table].dim for number, table in zip(bags, features, strict=True))
    assert out.shape == (size,)
    grad = torch.randn_like(out)
    wanted, row_grads, weight_grad = reference_step(
        rows, batch, features, weights.detach(), mean, lambda _: grad.double().cpu()
    )
    torch.testing.assert_close(out.detach().double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    out.backward(grad)
    if weight_grad is not None:
        torch.testing.assert_close(weights.grad.double().cpu(), weight_grad, rtol=1e-4, atol=1e-4)
    for table, row_grad in enumerate(row_grads):
        trained = torch.stack([rows_by_id(group, table)[i] for i in names]).double()
        step = 0.0 if row_grad is None else 0.1 * row_grad
        torch.testing.assert_close(trained, rows[table] - step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_same_as_bags_of_equal_number(device_type, optimizer):
    """Equals a lookup without ``bags`` bit for bit, over several steps."""
    dims, number = (8, 64, 12), 30
    actual, specs, features = make_groups(dims, OPTIMIZERS[optimizer], device_type)
    expected, _, _ = make_groups(dims, OPTIMIZERS[optimizer], device_type)
    columns = [specs[table].dim for table in features]
    for _ in range(4):
        batch = RaggedBatch([number] * len(features), random_ids(50), device_type)
        flat = look_up(actual, batch.ids, batch.offsets, batch.weights, True, batch.bags)
        matrix = look_up(expected, batch.ids, batch.offsets, batch.weights, True, None, number)
        parts = [part.flatten() for part in matrix.split(columns, dim=1)]
        assert torch.equal(flat, torch.cat(parts))
        grad = torch.randn_like(matrix)
        matrix.backward(grad)
        flat.backward(torch.cat([part.flatten() for part in grad.split(columns, dim=1)]))
    for table in range(len(dims)):
        got, wanted = rows_by_id(actual, table), rows_by_id(expected, table)
        assert got.keys() == wanted.keys()
        # On a GPU ids may be in other slots, which changes the order of sums.
        for id_, row in wanted.items():
            torch.testing.assert_close(got[id_], row, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [4, 7, 128, 300])
def test_a_row_an_id(device_type, dim):
    """Sequences: each id is a bag, and outputs are rows in the order of the ids."""
    specs = [TableSpec(f"t{i}", 500, dim, initializer=Uniform(-1, 1)) for i in range(2)]
    group = TableGroup(specs, [0, 1, 0], SGD(), device_type)
    pool = random_ids(60)
    bags = [100, 0, 37]
    ids = pool[torch.randint(0, 60, (137,))].to(device_type)
    out = look_up(group, ids, torch.arange(138, device=device_type), None, False, bags)
    held = rows_by_id(group, 0)
    wanted = torch.stack([held[id_] for id_ in ids.tolist()])
    assert torch.equal(out.detach().cpu().view(137, dim), wanted)
    grad = torch.randn_like(out)
    out.backward(grad)
    sums = dict.fromkeys(ids.tolist(), 0.0)
    for id_, part in zip(ids.tolist(), grad.cpu().double().view(137, dim), strict=True):
        sums[id_] = sums[id_] + part
    for id_, row in rows_by_id(group, 0).items():
        wanted = held[id_].double() - 0.1 * sums[id_]
        torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-5)
    assert rows_by_id(group, 1) == {}


def test_a_hot_id_over_features(device_type):
    """One id takes most bags of all features of a table; its gradients are summed once."""
    group = TableGroup([TableSpec("t", 64, 8)], [0, 0, 0], SGD(), device_type)
    bags = [50_000, 1, 30_000]
    n = sum(bags)
    ids = torch.full((n,), -(2**63), device=device_type)
    ids[::7] = 5
    out = look_up(group, ids, torch.arange(n + 1, device=device_type), None, False, bags)
    before = rows_by_id(group)
    grad = (torch.randint(-8, 9, out.shape, device=device_type) / 1024).float()
    out.backward(grad)
    by_id = grad.view(n, 8).double().cpu()
    for id_, row in rows_by_id(group).items():
        summed = by_id[(ids == id_).cpu()].sum(0)
        wanted = before[id_].double() - rate(0.1, group).double().cpu() * summed
        torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-5)


def test_evaluation_inserts_nothing(device_type):
    group, _, _ = make_groups((4, 8), None, device_type)
    batch = RaggedBatch([3, 0, 5], random_ids(20), device_type)
    slots = group.find(batch.ids, batch.offsets, 0, batch.bags)
    assert (slots == -1).all()
    anchor = torch.empty(0, device=device_type)
    where = (batch.ids, batch.offsets, None, slots, 0, False, None, rate(0.1, group))
    out = group.pooled_lookup(anchor, *where, batch.bags)
    assert out.shape == (3 * 4 + 5 * 4,)
    assert not out.requires_grad
    assert group.sizes() == [0, 0]


@pytest.mark.parametrize(
    ("bags", "match"),
    [
        ([1, 2], r"bags must have 3 numbers, one for each feature, but has 2"),
        ([1, -2, 5], r"bags of feature 1 are -2, but must be from 0 to 2\^31 - 1"),
        ([1, 1, 1], r"offsets must have 4 elements, but has 5"),
    ],
)
def test_bad_numbers_of_bags(bags, match):
    group, _, _ = make_groups((4, 8), SGD(), "cpu")
    ids, offsets = torch.arange(4), torch.arange(5)
    for call in (
        lambda: group.find(ids, offsets, 0, bags),
        lambda: group.find_or_insert(ids, offsets, 0, None, bags),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert group.sizes() == [0, 0]


def test_a_gradient_of_another_shape():
    group, _, _ = make_groups((4, 8), SGD(), "cpu")
    batch = RaggedBatch([2, 1, 3], random_ids(9), "cpu")
    slots = group.find_or_insert(batch.ids, batch.offsets, 0, None, batch.bags)
    args = (batch.ids, batch.offsets, None, slots, 0, False, rate(0.1, group), 1, batch.bags)
    for shape in [(27,), (4, 7), (28, 1)]:
        with pytest.raises(ValueError, match=r"grad must have shape \[28\], but has"):
            torch.ops.torchrec_hkv.update_rows(
                group.counter_tensor, group.handle, torch.zeros(shape), *args
            )


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_warm_step_waits_for_nothing_and_is_captured(dtype):
    """There are more features than one launch's arguments can describe."""
    features = 150
    spec = TableSpec("t", 4000, 8, initializer=Uniform(-1, 1))
    actual, expected = (TableGroup([spec], [0] * features, SGD(), "cuda") for _ in range(2))
    bags = [(7 * index) % 5 for index in range(features)]
    pool = random_ids(800)
    batches = [RaggedBatch(bags, pool, "cuda") for _ in range(6)]
    maximum = max(len(batch.ids) for batch in batches)
    static = RaggedBatch(bags, pool, "cuda")
    static.ids = torch.zeros(maximum, dtype=torch.int64, device="cuda")

    def step(group, ids, offsets):
        out = look_up(group, ids, offsets, None, False, bags, dtype=dtype)
        out.backward(torch.ones_like(out))
        return out.detach()

    def fill(batch):
        """Uses all static ids: the last bag gets the surplus."""
        static.ids[: len(batch.ids)].copy_(batch.ids)
        static.ids[len(batch.ids) :] = batch.ids[0]
        static.offsets.copy_(batch.offsets)
        static.offsets[-1] = maximum

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches[:2]:
            fill(batch)
            step(actual, static.ids, static.offsets)
            step(expected, static.ids, static.offsets)
        fill(batches[2])
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(actual, static.ids, static.offsets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step(expected, static.ids, static.offsets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(actual, static.ids, static.offsets)
    for batch in batches[3:]:
        fill(batch)
        graph.replay()
        assert torch.equal(out, step(expected, static.ids, static.offsets))
    torch.cuda.synchronize()
    got, wanted = rows_by_id(actual), rows_by_id(expected)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[id_], row) for id_, row in wanted.items())
