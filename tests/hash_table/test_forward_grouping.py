"""On a GPU the forward groups positions of equal slots for its backward, in parallel with pooling.

The backward then gives the same bits as an update that groups positions itself.
"""

import pytest
import torch

from tests.support.batches import Bags, random_ids, rate
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import LAMB, Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

ops = torch.ops.torchrec_hkv
BATCH = 512
OPTIMIZERS = {"row-wise Adagrad": RowWiseAdagrad(), "Adam": Adam(), "LAMB": LAMB()}


def make(dims=(64, 128), optimizer=None, initial=None, **options):
    options |= {"initializer": Uniform(-1, 1), "initial_capacity": initial}
    specs = [TableSpec(f"t{t}", 20_000, dim, **options) for t, dim in enumerate(dims)]
    return TableGroup(specs, [0, 1, 0], optimizer or RowWiseAdagrad(), device="cuda")


def draw(kind):
    """Three features; ids that occur once, that repeat, and one that repeats often.

    In "few", one id in 25 repeats; batches share most ids.
    """
    bags = Bags.random(3, BATCH, random_ids(600)).to("cuda")
    if kind in ("alone", "few"):
        ids = torch.randperm(15_000 if kind == "alone" else 5_000, device="cuda")[: len(bags.ids)]
        if kind == "few":
            again = torch.rand(len(ids), device="cuda") < 0.04
            ids = ids[torch.randint(len(ids), ids.shape, device="cuda").where(again, arange(ids))]
        return Bags(ids, bags.offsets, BATCH)
    bags.ids[torch.rand(len(bags.ids), device="cuda") < 0.3] = 7
    return bags


def arange(ids):
    return torch.arange(len(ids), device="cuda")


def slots_of(group, bags):
    pin = group.pin()
    return group.find_or_insert(bags.ids, bags.offsets, BATCH, pin), pin


def train(group, bags, grad, weights=None, mean=False):
    """Trains by autograd."""
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    slots, pin = slots_of(group, bags)
    where = (bags.ids, bags.offsets, weights, slots, BATCH, mean, pin)
    out = group.pooled_lookup(anchor, *where, rate(0.1, group))
    out.backward(grad)
    torch.cuda.synchronize()  # now the host knows how to update the next batch
    return out


def train_by_ops(group, bags, grad, weights=None, mean=False):
    """Trains by an op that groups the positions itself."""
    slots, pin = slots_of(group, bags)
    anchor = torch.empty(0, device="cuda")
    where = (bags.ids, bags.offsets, weights, slots, BATCH, mean)
    out = ops.pooled_lookup(anchor, group.handle, *where, pin.number, rate(0.1, group))
    args = (bags.ids, bags.offsets, weights, slots, BATCH, mean, rate(0.1, group))
    ops.update_rows(group.counter_tensor, group.handle, grad, *args)
    torch.cuda.synchronize()
    return out


def entries(group):
    """Ids in order, with rows and states, of each table."""
    found = []
    for table in range(2):
        state = group.export_table(table)
        held = state.occupied
        order = state.ids[held].argsort()
        found += [state.ids[held][order], state.rows[held][order], state.states[held][order]]
    return found


@pytest.mark.parametrize("pooling", ["sum", "weighted mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dims", [(64, 128), (3, 300)], ids=str)
@pytest.mark.parametrize("kind", ["alone", "few", "repeated"])
def test_same_bits(kind, dims, optimizer, pooling):
    groups = [make(dims, OPTIMIZERS[optimizer]) for _ in range(2)]
    for _ in range(3):  # from the second step on, the path depends on the first
        bags = draw(kind)
        weights = torch.rand(len(bags.ids), device="cuda") if pooling != "sum" else None
        grad = torch.randn(BATCH, 2 * dims[0] + dims[1], device="cuda")
        outs = [
            step(group, bags, grad, weights, weights is not None)
            for step, group in zip((train, train_by_ops), groups, strict=True)
        ]
        assert torch.equal(*outs)
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)
    assert groups[0].optimizer_steps.tolist() == groups[1].optimizer_steps.tolist() == [3, 3]


@pytest.mark.parametrize("kind", ["alone", "few", "repeated"])
def test_two_backwards_of_one_forward(kind):
    """The first backward consumes the grouping."""
    groups = [make() for _ in range(2)]
    before, bags = draw(kind), draw(kind)
    for group in groups:
        train(group, before, torch.zeros(BATCH, 256, device="cuda"))
    grads = [torch.randn(BATCH, 256, device="cuda") for _ in range(2)]
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    slots, pin = slots_of(groups[0], bags)
    where = (bags.ids, bags.offsets, None, slots, BATCH, False)
    out = groups[0].pooled_lookup(anchor, *where, pin, rate(0.1, groups[0]))
    out.backward(grads[0], retain_graph=True)
    out.backward(grads[1])
    slots, pin = slots_of(groups[1], bags)
    where = (bags.ids, bags.offsets, None, slots, BATCH, False, rate(0.1, groups[1]))
    for grad in grads:
        ops.update_rows(groups[1].counter_tensor, groups[1].handle, grad, *where)
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"eviction": "lfu"}], ids=str)
def test_what_a_lookup_notes(options):
    """In batches of mostly unique ids, the grouping uses marks that the lookup made."""
    groups = [make(**options) for _ in range(2)]
    for _ in range(4):
        bags, grad = draw("few"), torch.randn(BATCH, 256, device="cuda")
        steps = zip((train, train_by_ops), groups, strict=True)
        outs = [step(group, bags, grad) for step, group in steps]
        assert torch.equal(*outs)
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("change", ["written to", "others", "another lookup between"])
def test_slots_that_are_not_what_was_noted(change):
    """Marks of other slots are not used."""
    groups = [make() for _ in range(2)]
    warm, bags, between = draw("few"), draw("few"), draw("few")
    grad = torch.randn(BATCH, 256, device="cuda")
    for group in groups:
        train(group, warm, torch.zeros_like(grad))
    used = []
    for group in groups:
        slots, pin = slots_of(group, bags)
        if change == "written to":
            slots[1:9] = slots[0].clone()
        elif change == "others":
            slots = slots.clone()
            slots[1:9] = slots[0].clone()
        else:
            group.find_or_insert(between.ids, between.offsets, BATCH, pin)
        used.append((slots, pin))
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    where = [(bags.ids, bags.offsets, None, slots, BATCH, False) for slots, _ in used]
    out = groups[0].pooled_lookup(anchor, *where[0], used[0][1], rate(0.1, groups[0]))
    out.backward(grad)
    update = (*where[1], rate(0.1, groups[1]))
    ops.update_rows(groups[1].counter_tensor, groups[1].handle, grad, *update)
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)


def test_a_graph_of_the_backward_alone():
    """Marks of a lookup before the capture do not hold for replays."""
    groups = [make() for _ in range(2)]
    warm, batches = draw("few"), [draw("few") for _ in range(3)]
    n = min(len(bags.ids) for bags in batches)
    offsets = torch.arange(3 * BATCH + 1, device="cuda").clamp(max=n)
    offsets[-1] = n
    grad = torch.randn(BATCH, 256, device="cuda")
    for group in groups:
        train(group, warm, torch.zeros_like(grad))
    group = groups[0]
    ids = batches[0].ids[:n].clone()
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, BATCH, pin)
    learning_rate = rate(0.1, group)
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        where = (ids, offsets, None, slots, BATCH, False, pin)
        group.pooled_lookup(anchor, *where, learning_rate).backward(grad)
    for bags in batches:
        ids.copy_(bags.ids[:n])
        slots.copy_(group.find_or_insert(ids, offsets, BATCH))
        graph.replay()
        other = Bags(bags.ids[:n], offsets, BATCH)
        train_by_ops(groups[1], other, grad)
    torch.cuda.synchronize()
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)


def test_a_table_that_grows_before_the_backward():
    groups = [make(initial=1000), make()]
    first, second = draw("repeated"), draw("alone")
    grad = torch.randn(BATCH, 256, device="cuda")
    for group in groups:
        anchor = torch.empty(0, device="cuda", requires_grad=True)
        slots, pin = slots_of(group, first)
        where = (first.ids, first.offsets, None, slots, BATCH, False, pin, rate(0.1, group))
        out = group.pooled_lookup(anchor, *where)
        before = group.present_slots(0)
        slots_of(group, second)
        assert (group.present_slots(0) > before) == (group is groups[0])
        out.backward(grad)
    for actual, other in zip(*map(entries, groups), strict=True):
        assert torch.equal(actual, other)


def test_bad_offsets_are_refused_by_a_backward_long_after():
    """The caller catches the error and continues; the bad batch's backward must raise, too."""
    group = make()
    bags = draw("repeated")
    train(group, bags, torch.randn(BATCH, 256, device="cuda"))
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    slots, pin = slots_of(group, bags)
    bad = bags.offsets.clone()
    bad[5] = bad[6] + 1
    args = (bags.ids, bad, None, slots, BATCH, False, pin, rate(0.1, group))
    out = group.pooled_lookup(anchor, *args)
    torch.cuda.synchronize()
    match = r"offsets must not decrease"
    with pytest.raises(ValueError, match=match):
        group.check_offsets()
    group.check_offsets()  # the error is raised once
    before = entries(group)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=match):
        group.check_offsets()
    for was, now in zip(before, entries(group), strict=True):
        assert torch.equal(was, now)


def test_no_grouping_without_a_backward_to_come():
    """A forward without a backward does not group, as its memory shows."""
    group = make()
    bags = draw("alone")
    slots, pin = slots_of(group, bags)
    where = (bags.ids, bags.offsets, None, slots, BATCH, False)
    taken = {}
    for training in (True, False):
        anchor = torch.empty(0, device="cuda", requires_grad=training)
        before = torch.cuda.memory_allocated()
        out = group.pooled_lookup(anchor, *where, pin, rate(0.1, group))
        taken[training] = torch.cuda.memory_allocated() - before
        del out
    assert taken[True] >= taken[False] + 6 * len(bags.ids)


def test_checks_of_the_op():
    group = make()
    bags = draw("repeated")
    slots, _ = slots_of(group, bags)
    where = (bags.ids, bags.offsets, None, slots, BATCH, False, rate(0.0, group))
    anchor = torch.empty(0, device="cuda")
    # No comparison of two runs: some bytes of `grouped` are undefined.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.pooled_lookup_grouped, (anchor, group.handle, *where), test_utils=checks
    )
    grouped, ways = ops.pooled_lookup_grouped(anchor, group.handle, *where)[1:]
    grad = torch.randn(BATCH, 256, device="cuda")
    update = (group.counter_tensor, group.handle, grad, *where, 1, None)
    for match, given in (
        (r"one of grouped and ways is None", (grouped, None)),
        (r"grouped must have", (grouped[:-1], ways)),
        (r"ways must have", (grouped, ways[:0])),
        (r"ways must be on cpu", (grouped, ways.cuda())),
    ):
        before = entries(group)
        with pytest.raises((ValueError, TypeError), match=match):
            ops.update_rows(*update, *given)
        assert all(map(torch.equal, before, entries(group)))
    torch.library.opcheck(ops.update_rows, (*update, grouped, ways), test_utils=checks)
