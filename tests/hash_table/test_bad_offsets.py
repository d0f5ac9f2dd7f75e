"""Invalid offsets: a CPU refuses the call at once, a GPU the next call.

On a GPU only kernels read offsets. Whatever the offsets are, no kernel reads or writes outside of
arrays (run this file under compute-sanitizer to check), and no row is updated.
"""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rate, rows_by_id
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import SGD, Adam, TableGroup, TableSpec, Uniform

BAGS, FEATURES = 50, 3
IDS = 4 * BAGS * FEATURES  # 4 ids a bag
# On a GPU: rows with a fast path, wider than a warp, read value by value, and one table only.
GROUPS = [((8, 64), [0, 1, 0]), ((260, 132), [0, 1, 1]), ((3, 6), [1, 0, 1]), ((32,), [0, 0, 0])]


def good_offsets():
    return torch.arange(BAGS * FEATURES + 1) * 4


def spoiled(bag, value):
    offsets = good_offsets()
    offsets[bag] = value
    return offsets


CASES = {
    "decreasing": (spoiled(70, 5), r"offsets must not decrease, but go from 276 to 5 at bag 69"),
    "over features": (
        torch.cat([good_offsets()[:40], torch.full((20,), 590), good_offsets()[60:]]),
        r"offsets must not decrease, but go from 590 to 240 at bag 59",
    ),
    "overrunning": (
        spoiled(BAGS * FEATURES, IDS + 1000),
        rf"offsets must end with the number of ids, {IDS}, but ",
    ),
    "far away": (spoiled(30, 2**62), r"offsets must "),
    "negative": (spoiled(30, -(2**62)), r"offsets must "),
    "begin later": (spoiled(0, 2), r"offsets must begin with 0, but begin with 2"),
    "end early": (
        spoiled(BAGS * FEATURES, IDS - 2),
        rf"offsets must end with the number of ids, {IDS}, but ",
    ),
    "all backwards": (good_offsets().flip(0), r"offsets must "),
}


def make(dims, features, device, optimizer=None):
    specs = [
        TableSpec(f"t{i}", 2000, dim, initializer=Uniform(-1, 1)) for i, dim in enumerate(dims)
    ]
    return TableGroup(specs, features, optimizer or SGD(), device)


def all_rows(group):
    return [rows_by_id(group, table) for table in range(len(group.tables))]


def assert_unchanged(group, before):
    for was, now in zip(before, all_rows(group), strict=True):
        assert all(torch.equal(now[id_], row) for id_, row in was.items())


@pytest.mark.parametrize("case", list(CASES))
def test_on_a_cpu_at_once(case):
    offsets, match = CASES[case]
    group = make((8, 64), [0, 1, 0], "cpu")
    with pytest.raises(ValueError, match=match):
        lookup(group, Bags(random_ids(IDS), offsets, BAGS))
    assert group.sizes() == [0, 0]


@needs_gpu
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("dims", "features"), GROUPS, ids=str)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("kind", ["plain", "weighted", "mean", "ragged"])
def test_on_a_gpu_by_the_next_call(case, dims, features, distinct, kind):
    offsets, match = CASES[case]
    group = make(dims, features, "cuda", Adam() if distinct else SGD())
    pool = random_ids(10_000 if distinct else 40)
    good = Bags(pool[torch.randint(0, len(pool), (IDS,))], good_offsets(), BAGS).to("cuda")
    weights = torch.rand(IDS, device="cuda").requires_grad_() if kind == "weighted" else None
    numbers = [BAGS] * FEATURES if kind == "ragged" else None

    def step(where):
        anchor = torch.empty(0, device="cuda", requires_grad=True)
        pin = group.pin()
        slots = group.find_or_insert(good.ids, where, BAGS, pin, numbers)
        args = (good.ids, where, weights, slots, BAGS, kind == "mean", pin, rate(0.1, group))
        out = group.pooled_lookup(anchor, *args, numbers)
        out.backward(torch.ones_like(out))

    for _ in range(2):  # the first batch decides how the second is updated
        step(good.offsets)
        torch.cuda.synchronize()
    before = all_rows(group)
    bad = offsets.to("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(bad)
    except ValueError:  # the GPU reported before the host checked
        pass
    else:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=match):
            step(good.offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert_unchanged(group, before)
    step(good.offsets)
    torch.cuda.synchronize()
    group.check_offsets()
    changed = all_rows(group)
    assert any(
        not torch.equal(changed[table][id_], row)
        for table, rows in enumerate(before)
        for id_, row in rows.items()
    )


@pytest.mark.parametrize("bags", [None, [0, 0, 0]], ids=str)
def test_ids_without_a_bag(device_type, bags):
    """The host knows this without the device, so a GPU refuses at once, too."""
    group = make((8, 64), [0, 1, 0], device_type)
    ids = random_ids(5).to(device_type)
    offsets = torch.zeros(1, dtype=torch.int64, device=device_type)
    for call in (
        lambda: group.find(ids, offsets, 0, bags),
        lambda: group.find_or_insert(ids, offsets, 0, None, bags),
    ):
        with pytest.raises(ValueError, match=r"a batch without bags must have no ids, but has 5"):
            call()
    assert group.sizes() == [0, 0]
    assert group.find(ids[:0], offsets, 0, bags).numel() == 0


@needs_gpu
def test_counters_say_it():
    group = make((8, 64), [0, 1, 0], "cuda")
    offsets, match = CASES["decreasing"]
    bags = Bags(random_ids(IDS), offsets, BAGS).to("cuda")
    slots = insert(group, bags)
    anchor = torch.empty(0, device="cuda")
    args = (bags.ids, bags.offsets, None, slots, BAGS, False, None, rate(0.1, group))
    group.pooled_lookup(anchor, *args)
    with pytest.raises(ValueError, match=match + r"\. The GPU found this in an earlier call"):
        group.counters()
    assert len(group.counters()) == 2


@needs_gpu
@pytest.mark.parametrize("case", list(CASES))
def test_a_graph_says_it_when_it_is_replayed(case):
    group = make((8, 64), [0, 1, 0], "cuda")
    bags = Bags(random_ids(IDS), good_offsets(), BAGS).to("cuda")
    insert(group, bags)
    anchor = torch.empty(0, device="cuda")

    def evaluate():
        slots = group.find(bags.ids, bags.offsets, BAGS)
        args = (bags.ids, bags.offsets, None, slots, BAGS, False, None, learning_rate)
        return group.pooled_lookup(anchor, *args)

    learning_rate = rate(0.1, group)
    expected = evaluate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = evaluate()
    graph.replay()
    torch.cuda.synchronize()
    group.check_offsets()
    assert torch.equal(out, expected)
    offsets, match = CASES[case]
    bags.offsets.copy_(offsets)
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=match):
        group.check_offsets()
    bags.offsets.copy_(good_offsets())
    graph.replay()
    torch.cuda.synchronize()
    group.check_offsets()
    assert torch.equal(out, expected)
