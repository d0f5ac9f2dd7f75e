"""16-bit outputs and gradients: sums in float32 that are rounded once."""

import pytest
import torch

from tests.support.batches import Bags, random_ids, rate, rows_by_id
from torchrec_hkv.hash_table import SGD, Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

NARROW = [torch.float16, torch.bfloat16]
# On a GPU: rows with a fast path, rows read value by value, rows wider than a warp.
DIMS = [(8, 64, 128), (1, 3, 6), (260, 132)]


def make(dims, optimizer, device, dtype=torch.float32):
    specs = [
        TableSpec(f"t{i}", 400, dim, dtype=dtype, initializer=Uniform(-1, 1))
        for i, dim in enumerate(dims)
    ]
    return TableGroup(specs, [*range(len(dims)), 0], optimizer, device)


def look_up(group, bags, weights, mean, dtype, numbers=None):
    anchor = torch.empty(0, device=bags.ids.device, requires_grad=True)
    pin = group.pin()
    size = bags.batch_size
    slots = group.find_or_insert(bags.ids, bags.offsets, size, pin, numbers)
    where = (bags.ids, bags.offsets, weights, slots, size, mean, pin, rate(0.1, group))
    return group.pooled_lookup(anchor, *where, numbers, dtype)


@pytest.mark.parametrize("rows", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_are_rounded_once(device_type, dtype, dims, weighted, rows):
    group = make(dims, None, device_type, rows)
    bags = Bags.random(len(dims) + 1, 40, random_ids(100), longest=30).to(device_type)
    weights = torch.rand(len(bags.ids), device=device_type) if weighted else None
    for mean in (False, True):
        exact = look_up(group, bags, weights, mean, None)
        assert exact.dtype == torch.float32
        narrow = look_up(group, bags, weights, mean, dtype)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, exact.to(dtype))
        flat = look_up(group, bags, weights, mean, dtype, [40] * (len(dims) + 1))
        columns = [*dims, dims[0]]
        parts = [part.flatten() for part in narrow.split(columns, dim=1)]
        assert torch.equal(flat, torch.cat(parts))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(eps=1e-6), Adam()], ids=repr)
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_of_16_bits_are_those_widened(device_type, dtype, dims, optimizer, ragged):
    """16-bit gradients give, bit for bit, the rows and weight gradients of the same gradient in
    float32: sums follow the order of the batch, whatever the slots."""
    narrow, wide = (make(dims, optimizer, device_type) for _ in range(2))
    pool = random_ids(60)
    for _ in range(3):
        bags = Bags.random(len(dims) + 1, 40, pool).to(device_type)
        numbers = [40] * (len(dims) + 1) if ragged else None
        weights = [torch.rand(len(bags.ids), device=device_type).requires_grad_()]
        weights.append(weights[0].detach().clone().requires_grad_())
        out = look_up(narrow, bags, weights[0], True, dtype, numbers)
        reference = look_up(wide, bags, weights[1], True, None, numbers)
        grad = torch.randn_like(reference).to(dtype)
        out.backward(grad)
        reference.backward(grad.float())
        assert torch.equal(weights[0].grad, weights[1].grad)
    for table in range(len(dims)):
        got, wanted = rows_by_id(narrow, table), rows_by_id(wide, table)
        assert got.keys() == wanted.keys()
        assert got
        for id_, row in wanted.items():
            assert torch.equal(got[id_], row)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_hot_id(device_type, dtype):
    """The sum of 100,000 16-bit gradients equals that of their exact values."""
    group = TableGroup([TableSpec("t", 64, 8)], [0], SGD(), device_type)
    n = 100_000
    ids = torch.full((n,), 3, device=device_type)
    bags = Bags(ids, torch.arange(n + 1, device=device_type), n)
    out = look_up(group, bags, None, False, dtype)
    grad = (torch.randint(-8, 9, out.shape, device=device_type) / 1024).to(dtype)
    before = rows_by_id(group)[3].double()
    out.backward(grad)
    wanted = before - rate(0.1, group).double().cpu() * grad.double().sum(0).cpu()
    torch.testing.assert_close(rows_by_id(group)[3].double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_held_gradients(device_type, dtype):
    """Held gradients of several backwards, one in float32 and one with other numbers of bags, are
    applied as one batch."""
    dims = (8, 64)
    actual, expected = (make(dims, SGD(), device_type) for _ in range(2))
    pool = random_ids(30)
    batches = [Bags.random(3, 10, pool).to(device_type) for _ in range(3)]
    numbers = [12, 0, 18]
    with actual.accumulate():
        first = look_up(actual, batches[0], None, False, dtype)
        second = look_up(actual, batches[1], None, False, dtype, numbers)
    before = [rows_by_id(actual, table) for table in range(2)]
    grads = [torch.randn_like(out.detach()) for out in (first, second)]
    first.backward(grads[0])
    second.backward(grads[1])
    for table in range(2):
        now = rows_by_id(actual, table)
        assert all(torch.equal(now[id_], row) for id_, row in before[table].items())
    third = look_up(actual, batches[2], None, False, None)
    grads.append(torch.randn_like(third.detach()))
    third.backward(grads[2])
    # SGD is linear: one step for each batch gives the same.
    for bags, grad, each in zip(batches, grads, (None, numbers, None), strict=True):
        look_up(expected, bags, None, False, None, each).backward(grad.float())
    for table in range(2):
        got, wanted = rows_by_id(actual, table), rows_by_id(expected, table)
        assert got.keys() == wanted.keys()
        for id_, row in wanted.items():
            torch.testing.assert_close(got[id_], row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_other_dtypes_are_refused(dtype):
    group = make((4,), SGD(), "cpu")
    bags = Bags.random(2, 3, random_ids(5))
    with pytest.raises(TypeError, match=r"the output must be of dtype Float, Half or BFloat16, bu"):
        look_up(group, bags, None, False, dtype)
    slots = group.find_or_insert(bags.ids, bags.offsets, 3)
    args = (bags.ids, bags.offsets, None, slots, 3, False, rate(0.1, group))
    update = torch.ops.torchrec_hkv.update_rows
    with pytest.raises(TypeError, match=r"grad must be of dtype Float, Half or BFloat16, but is"):
        update(group.counter_tensor, group.handle, torch.zeros(3, 8, dtype=dtype), *args)
