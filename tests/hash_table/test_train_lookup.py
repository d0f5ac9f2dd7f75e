"""A training lookup in one call equals its parts called one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import Bags, insert, random_ids, rate
from tests.support.steps import contents
from torchrec_hkv.hash_table import Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

ops = torch.ops.torchrec_hkv
BATCH = 16
NUMBERS = [10, 0, 38]  # bags of each feature, if they differ


def make(device, optimizer=None, **options):
    options |= {"initializer": Uniform(-1, 1), "deterministic": True}
    specs = [TableSpec(f"t{t}", 2000, dim, **options) for t, dim in enumerate((8, 5))]
    return TableGroup(specs, [0, 1, 0], optimizer or RowWiseAdagrad(), device=device)


def in_parts(group, bags, weights, mean, numbers=None, dtype=None):
    anchor = torch.empty(0, device=group.device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(bags.ids, bags.offsets, BATCH, pin, numbers)
    where = (bags.ids, bags.offsets, weights, slots, BATCH, mean, pin)
    return group.pooled_lookup(anchor, *where, rate(0.1, group), numbers, dtype)


def in_one(group, bags, weights, mean, numbers=None, dtype=None):
    anchor = torch.empty(0, device=group.device, requires_grad=True)
    where = (bags.ids, bags.offsets, weights, BATCH, mean)
    return group.train_lookup(anchor, *where, rate(0.1, group), numbers, dtype)


def same(groups):
    parts = zip(*(contents(group, 2) for group in groups), strict=True)
    return all(torch.equal(*pair) for pair in parts)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["even", "ragged"])
@pytest.mark.parametrize(("weighted", "mean"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(), Adam()], ids=["Adagrad", "Adam"])
def test_as_in_parts(device_type, optimizer, weighted, mean, numbers, dtype):
    groups = [make(device_type, optimizer, initial_capacity=64) for _ in range(2)]
    pool = random_ids(300)
    for _ in range(4):  # the tables grow meanwhile
        bags = Bags.random(3, BATCH, pool).to(device_type)
        outs, grads, grad = [], [], None
        for group, look_up in zip(groups, (in_parts, in_one), strict=True):
            weights = None
            if weighted:
                torch.manual_seed(len(bags.ids))
                weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
            out = look_up(group, bags, weights, mean, numbers, dtype)
            grad = torch.randn_like(out) if grad is None else grad
            out.backward(grad)
            if device_type == "cuda":
                torch.cuda.synchronize()  # now the host knows how to update the next batch
            outs.append(out)
            grads.append(weights.grad if weighted else torch.empty(0))
        assert torch.equal(*outs)
        assert torch.equal(*grads)
        assert outs[1].dtype == (dtype or torch.float32)
    assert same(groups)
    assert groups[0].counters() == groups[1].counters()
    assert groups[1].growths > 0


def test_rows_stay_until_the_backward(device_type):
    """A full table does not evict rows that await a backward."""
    group = make(device_type)
    bags = Bags.flat(torch.arange(500, device=device_type))
    bags = Bags(bags.ids, torch.tensor([0, 500, 500, 500], device=device_type), 1)
    anchor = torch.empty(0, device=device_type, requires_grad=True)
    where = (bags.ids, bags.offsets, None, 1, False)
    out = group.train_lookup(anchor, *where, rate(0.1, group))
    others = torch.arange(1000, 20_000, device=device_type)
    insert(
        group, Bags(others, torch.tensor([0, len(others)] + [len(others)] * 2), 1).to(device_type)
    )
    assert (group.find(bags.ids, bags.offsets, 1) >= 0).all()
    out.backward(torch.ones_like(out))
    insert(group, Bags(others + 50_000, torch.tensor([0] + [len(others)] * 3), 1).to(device_type))
    assert (group.find(bags.ids, bags.offsets, 1) < 0).any()


def test_a_backward_after_growth(device_type):
    groups = [make(device_type, initial_capacity=64) for _ in range(2)]
    first = Bags.random(3, BATCH, random_ids(50)).to(device_type)
    second = Bags.random(3, BATCH, random_ids(900), longest=30).to(device_type)
    for group, look_up in zip(groups, (in_parts, in_one), strict=True):
        out, before = look_up(group, first, None, False), group.growths
        insert(group, second)
        assert group.growths > before
        torch.manual_seed(3)
        out.backward(torch.randn_like(out))
    assert same(groups)


def test_held_gradients(device_type):
    groups = [make(device_type) for _ in range(2)]
    pool = random_ids(40)
    batches = [Bags.random(3, BATCH, pool).to(device_type) for _ in range(3)]
    grads = torch.randn(3, BATCH, 21, device=device_type)
    for group, look_up in zip(groups, (in_parts, in_one), strict=True):
        with group.accumulate():
            for bags, grad in zip(batches[:2], grads[:2], strict=True):
                look_up(group, bags, None, False).backward(grad)
        look_up(group, batches[2], None, False).backward(grads[2])
    assert same(groups)
    assert groups[1].optimizer_steps.tolist() == [1, 1]


def test_two_backwards_of_one_lookup(device_type):
    groups = [make(device_type) for _ in range(2)]
    bags = Bags.random(3, BATCH, random_ids(40)).to(device_type)
    grads = torch.randn(2, BATCH, 21, device=device_type)
    for group, look_up in zip(groups, (in_parts, in_one), strict=True):
        out = look_up(group, bags, None, False)
        out.backward(grads[0], retain_graph=True)
        out.backward(grads[1])
    assert same(groups)


def test_without_a_backward_to_come_nothing_stays_pinned(device_type):
    group = make(device_type)
    bags = Bags.random(3, BATCH, random_ids(40)).to(device_type)
    args = (bags.ids, bags.offsets, None, BATCH, False, rate(0.1, group))
    wanted = in_one(group, bags, None, False)
    for _ in range(100):  # 64 of them could be pending
        with torch.no_grad():
            got = group.train_lookup(torch.empty(0, device=device_type), *args)
        with torch.inference_mode():
            inferred = group.train_lookup(torch.empty(0, device=device_type), *args)
    assert torch.equal(got, wanted)
    assert torch.equal(inferred, wanted)
    assert not got.requires_grad


def test_too_many_lookups_wait(device_type):
    group = make(device_type)
    bags = Bags.random(3, BATCH, random_ids(40)).to(device_type)
    outs = [in_one(group, bags, None, False) for _ in range(64)]
    with pytest.raises(RuntimeError, match="64 lookups of this group wait for their backward"):
        in_one(group, bags, None, False)
    del outs
    in_one(group, bags, None, False)


BAD = [
    ({"weights": torch.ones(3)}, "weights must have"),
    ({"weights": torch.ones(1, dtype=torch.float64)}, "weights must be of dtype Float"),
    ({"learning_rate": torch.ones(1)}, "learning_rate must have no dimensions"),
    ({"learning_rate": torch.ones((), dtype=torch.float64)}, "learning_rate must be of dtype"),
    ({"dtype": torch.float64}, "the output must be of dtype Float, Half or BFloat16"),
    ({"batch_size": 3}, "offsets must have 10 elements"),
    ({"batch_size": -1}, "batch_size is -1"),
    ({"bags": [1, 2]}, "bags must have 3 numbers"),
    ({"ids": torch.ones(4)}, "ids must be a tensor of integers"),
]


@pytest.mark.parametrize(("changed", "match"), BAD)
def test_bad_input_changes_nothing(device_type, changed, match):
    group = make(device_type)
    bags = Bags.random(3, BATCH, random_ids(40)).to(device_type)
    arguments = {
        "anchor": torch.empty(0, device=device_type, requires_grad=True),
        "ids": bags.ids,
        "offsets": bags.offsets,
        "weights": None,
        "batch_size": BATCH,
        "mean": False,
        "learning_rate": rate(0.1, group),
    }
    arguments |= {
        name: value.to(device_type) if isinstance(value, torch.Tensor) else value
        for name, value in changed.items()
    }
    with pytest.raises((TypeError, ValueError), match=match):
        group.train_lookup(**arguments)
    assert group.sizes() == [0, 0]
    assert group.clock == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["even", "ragged"])
def test_op(device_type, weighted, numbers):
    group = make(device_type)
    bags = Bags.random(3, BATCH, random_ids(40)).to(device_type)
    group.find_or_insert(bags.ids, bags.offsets, BATCH, None, numbers)
    weights = None
    if weighted:
        weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
    anchor = torch.empty(0, device=device_type, requires_grad=True)
    # The learning rate is 0, since opcheck runs the op several times and compares.
    args = (group.counter_tensor, anchor, group.handle, bags.ids, bags.offsets, weights, BATCH)
    args = (*args, True, rate(0.0, group), numbers)
    # No comparison with a compiled op: a trace would hold the pin of one call.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.train_lookup, args, test_utils=checks)
