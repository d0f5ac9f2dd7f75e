"""The ops of a sync agree with reads of all slots, slot by slot; schemas and fakes are correct."""

import pytest
import torch

from tests.support.saved_tables import filled

ops = torch.ops.torchrec_hkv
IS, WAS, TOUCHED = 1, 2, 4


@pytest.fixture(params=["lru", "lfu", "customized"])
def table(request, device_type):
    return filled(device_type, 400, 700, eviction=request.param, state_dim=2)


def place(table):
    return table._group.counter_tensor, table._group.handle, 0


def ids_of(table):
    group = table._group
    return ops.read_slots(group.handle, 0, group.select_slots(0))[0]


def same_bits(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def random_marks(table, n):
    return (torch.rand(n) < 0.3).to(table.device)


def expected_changes(state, first, was, marked, since, moved):
    """Bits of slots that may have changed, computed slot by slot from an export."""
    there, steps = state.occupied.tolist(), (state.last_steps.long() & 0xFFFFFFFF).tolist()
    changes = {}
    for i, had in enumerate(was.tolist()):
        slot = first + i
        touched = there[slot] and (steps[slot] >= since or (marked is not None and marked[i]))
        differs = there[slot] != had or touched or (moved and there[slot])
        if differs:
            changes[slot] = IS * there[slot] + WAS * had + TOUCHED * touched
    return changes


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(("first", "n"), [(0, None), (3, 250), (70, 1), (5, 0)])
def test_slot_changes(table, first, n, marks, moved):
    table.erase(ids_of(table)[::7])
    n = table.num_slots if n is None else n
    state = table._group.export_table(0)
    was = random_marks(table, n)
    marked = random_marks(table, n) if marks else None
    for since in (0, table._group.clock, table._group.clock + 1, 1 << 32):
        slots, bits, ids = ops.slot_changes(*place(table), first, was, marked, since, moved)
        assert bits.dtype == torch.uint8
        expected = expected_changes(state, first, was, marked, since, moved)
        assert dict(zip(slots.tolist(), bits.tolist(), strict=True)) == expected
        assert slots.tolist() == sorted(expected)
        there = (bits & IS).bool()
        assert torch.equal(ids[there], state.ids[slots[there]])


@pytest.mark.parametrize("states", [False, True])
def test_values_read(table, states):
    group = table._group
    slots = group.select_slots(0)[::3].clone()
    slots[::4] = -1
    there = slots >= 0
    dim = group.tables[0].dim
    values = torch.full((len(slots), dim + 5), 7.0, device=table.device)
    last_steps, scores = ops.read_values(group.handle, 0, slots, values, states)
    _, rows, steps, own_scores, own_states = ops.read_slots(group.handle, 0, slots[there])
    width = dim + 2 if states else dim
    same_bits(values[there, :dim], rows)
    if states:
        same_bits(values[there, dim:width], own_states)
    assert (values[~there, :width] == 0).all()
    assert (values[:, width:] == 7).all()
    assert torch.equal(last_steps[there], steps)
    assert (last_steps[~there] == 0).all()
    assert scores.numel() == (0 if table.eviction == "lru" else len(slots))
    if own_scores.numel():
        assert torch.equal(scores[there], own_scores)


@pytest.mark.parametrize("states", [False, True])
def test_values_written(table, states):
    group = table._group
    before = group.export_table(0)
    slots = group.select_slots(0)[::2].clone()
    ids, _, steps, scores, _ = ops.read_slots(group.handle, 0, slots)
    named = ids.clone()
    named[::5] ^= 1  # differ from the ids in the slots
    slots[1::5] = -1
    dim = group.tables[0].dim
    values = torch.randn(len(slots), dim + 5, device=table.device)
    given = named, values, steps + 3, scores + 2, states
    ops.write_values(*place(table), slots, *given)
    after = group.export_table(0)
    written = (named == ids) & (slots >= 0)
    at = slots[written]
    expected = {name: getattr(before, name).clone() for name in ("rows", "states", "last_steps")}
    expected["rows"][at] = values[written, :dim]
    expected["last_steps"][at] += 3
    if states:
        expected["states"][at] = values[written, dim : dim + 2]
    occupied = before.occupied
    for name, wanted in expected.items():
        same_bits(getattr(after, name)[occupied], wanted[occupied])
    if scores.numel():
        wanted = before.scores.clone()
        wanted[at] += 2
        assert torch.equal(after.scores[occupied], wanted[occupied])
    assert torch.equal(after.ids[occupied], before.ids[occupied])


@pytest.mark.parametrize("n", [0, 1, 700])
def test_exchanged_contents(device_type, n):
    """The op updates a snapshot in host memory, also from a GPU, and returns the previous ids."""
    pin = device_type == "cuda"
    ids, occupied = torch.randint(-(2**63), 2**63 - 1, (1000,)), torch.rand(1000) < 0.5
    slots = torch.randperm(1000)[:n]
    now, is_there = ids[slots], torch.rand(n) < 0.5
    changed = torch.rand(n) < 0.5
    now[changed] = torch.randint(-(2**63), 2**63 - 1, (int(changed.sum()),))
    held = torch.empty(1000, dtype=torch.int64, pin_memory=pin).copy_(ids)
    held_occupied = torch.empty(1000, dtype=torch.bool, pin_memory=pin).copy_(occupied)
    given = [tensor.to(device_type) for tensor in (slots, now, is_there)]
    previous = ops.exchange_contents(held, held_occupied, *given)
    assert torch.equal(previous.cpu(), ids[slots])  # the comparison waits for the GPU
    ids[slots], occupied[slots] = now, is_there
    assert torch.equal(held, ids)
    assert torch.equal(held_occupied, occupied)


def test_exchanged_contents_of_bad_tensors(device_type):
    ids, occupied = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.bool)
    slots = torch.arange(3, device=device_type)
    there = torch.ones(3, dtype=torch.bool, device=device_type)
    with pytest.raises(ValueError, match="occupied must have 3 elements, but has 2"):
        ops.exchange_contents(ids, occupied, slots, slots, there[:2])
    with pytest.raises(TypeError, match="snapshot_ids must be of dtype Long"):
        ops.exchange_contents(ids.int(), occupied, slots, slots, there)
    if device_type == "cpu":
        with pytest.raises(ValueError, match="slots has 9, but the snapshot has 9 slots"):
            ops.exchange_contents(ids, occupied, slots + 7, slots, there)
        assert not ids.any()
    else:
        with pytest.raises(ValueError, match="the snapshot must be pinned"):
            ops.exchange_contents(ids, occupied, slots, slots, there)


def test_schemas(table):
    group = table._group
    was = random_marks(table, 40)
    torch.library.opcheck(ops.slot_changes, (*place(table), 3, was, None, 1, True))
    torch.library.opcheck(ops.slot_changes, (*place(table), 3, was, was, 1, False))
    slots = group.select_slots(0)[:9]
    values = torch.randn(9, group.tables[0].dim + 5, device=table.device)
    torch.library.opcheck(ops.read_values, (group.handle, 0, slots, values, True))
    ids, _, steps, scores, _ = ops.read_slots(group.handle, 0, slots)
    args = (*place(table), slots, ids, values, steps, scores, True)
    torch.library.opcheck(ops.write_values, args)
    if table.device.type == "cpu":  # opcheck copies the snapshot to memory that is not pinned
        held = torch.zeros(table.num_slots, dtype=torch.int64), torch.zeros(table.num_slots) > 0
        torch.library.opcheck(ops.exchange_contents, (*held, slots, ids, ids > 0))


def test_bad_input(table):
    group = table._group
    was = random_marks(table, 40)
    maximum, dim = table.num_slots, group.tables[0].dim
    with pytest.raises(
        ValueError, match=f"slots from {maximum - 39} to {maximum + 1} were asked for"
    ):
        ops.slot_changes(*place(table), maximum - 39, was, None, 0, False)
    with pytest.raises(TypeError, match="occupied must be of dtype Bool"):
        ops.slot_changes(*place(table), 0, was.long(), None, 0, False)
    with pytest.raises(ValueError, match="marked must have 40 elements, but has 39"):
        ops.slot_changes(*place(table), 0, was, was[1:], 0, False)
    with pytest.raises(ValueError, match="since is -1, but must be at least 0"):
        ops.slot_changes(*place(table), 0, was, None, -1, False)
    slots = group.select_slots(0)[:9]
    values = torch.randn(9, dim + 1, device=table.device)
    with pytest.raises(ValueError, match=rf"values must have shape \[9, at least {dim + 2}\]"):
        ops.read_values(group.handle, 0, slots, values, True)
    with pytest.raises(TypeError, match="values must be of dtype Float"):
        ops.read_values(group.handle, 0, slots, values.double(), False)
    ids, _, steps, scores, _ = ops.read_slots(group.handle, 0, slots)
    with pytest.raises(ValueError, match="ids must have 9 elements, but has 8"):
        ops.write_values(*place(table), slots, ids[1:], values, steps, scores, False)


def test_rows_of_other_types(device_type):
    table = filled(device_type, 400, 64, dtype=torch.bfloat16)
    values = torch.zeros(1, table._group.tables[0].dim, device=table.device)
    slots = torch.zeros(1, dtype=torch.int64, device=table.device)
    with pytest.raises(TypeError, match="of tables of float32 rows only"):
        ops.read_values(table._group.handle, 0, slots, values, False)
