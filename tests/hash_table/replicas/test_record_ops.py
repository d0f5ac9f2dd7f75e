"""The ops that swap and compare slots agree with reads of all slots, entry by entry."""

from __future__ import annotations

import pytest
import torch

from tests.support.saved_tables import filled
from torchrec_hkv.hash_table import initial_rows

ops = torch.ops.torchrec_hkv
IS_HERE, WAS_HERE = 1, 2
BEGIN = 5


@pytest.fixture(params=["lru", "lfu", "customized"])
def table(request):
    return filled("cpu", 400, 700, eviction=request.param, state_dim=2)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def typed_table(request):
    return filled("cpu", 400, 700, eviction="lfu", dtype=request.param, state_dim=2)


def place(table):
    return table._group.counter_tensor, table._group.handle, 0


def marks(n: int) -> torch.Tensor:
    return torch.rand(n) < 0.3


def numbers(table, slots: torch.Tensor) -> torch.Tensor:
    """Rows of an export as float32."""
    stored = table._group.export_table(0).rows[slots]
    if stored.dtype != torch.int8:
        return stored.float()
    dim = table._group.tables[0].dim
    scales = stored[:, :4].contiguous().view(torch.float32)
    return stored[:, 4 : 4 + dim].float() * scales


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("first", "n"), [(0, None), (3, 250), (70, 1), (5, 0)])
def test_compare_slots(table, first, n, marked, moved):
    slots = table._group.select_slots(0)
    table.erase(ops.read_slots(table._group.handle, 0, slots)[0][::7])
    n = table.num_slots if n is None else n
    state = table._group.export_table(0)
    there, steps = state.occupied.tolist(), (state.last_steps.long() & 0xFFFFFFFF).tolist()
    for since in (0, table._group.clock, table._group.clock + 1, 1 << 32):
        was = torch.rand(n) < 0.7
        before = torch.where(
            marks(n), state.ids[first : first + n] ^ 1, state.ids[first : first + n]
        )
        given = marks(n) if marked else None
        now, removed, ids_then, was_then = [], [], before.tolist(), was.tolist()
        for i in range(n):
            slot = first + i
            touched = there[slot] and (steps[slot] >= since or (marked and bool(given[i])))
            is_same = there[slot] and was_then[i] and int(state.ids[slot]) == ids_then[i]
            if not moved and there[slot] == was_then[i] and not touched:
                continue  # an entry that was not looked up stays where it is
            if was_then[i] and not is_same:
                removed.append((slot, ids_then[i]))
            if there[slot] and (touched or not is_same):
                now.append((slot, int(state.ids[slot]), touched, is_same))
            was_then[i] = there[slot]
            ids_then[i] = int(state.ids[slot]) if there[slot] else ids_then[i]
        found = ops.compare_slots(*place(table), first, before, was, given, since, moved, True)
        assert list(zip(*(part.tolist() for part in found[:4]), strict=True)) == now
        assert list(zip(*(part.tolist() for part in found[4:]), strict=True)) == removed
        assert was.tolist() == was_then
        assert [i for i, is_ in zip(before.tolist(), was_then, strict=True) if is_] == [
            i for i, is_ in zip(ids_then, was_then, strict=True) if is_
        ]


@pytest.mark.parametrize("marked", [False, True])
def test_where_no_slot_was_freed(table, marked):
    """No slot was freed since the snapshot, but ids were inserted and replaced."""
    group = table._group
    table.erase(ops.read_slots(group.handle, 0, group.select_slots(0))[0][::7])
    state = group.export_table(0)
    n, clock = table.num_slots, group.clock
    steps, there = state.last_steps.long() & 0xFFFFFFFF, state.occupied
    for since in (1, clock, clock + 1):
        given = marks(n) if marked else None
        touched = there & (steps >= since)
        if marked:
            touched |= there & given
        came, other = touched & marks(n), touched & marks(n)
        before, was = torch.where(other, state.ids ^ 1, state.ids), there & ~came
        results = []
        for freed in (False, True):
            ids, occupied = before.clone(), was.clone()
            args = (*place(table), 0, ids, occupied, given, since, False, freed)
            results.append([*ops.compare_slots(*args), ids[there], occupied])
        for quick, whole in zip(*results, strict=True):
            assert torch.equal(quick, whole)
        assert torch.equal(results[0][0], touched.nonzero().flatten())


def message_for(n: int, width: int) -> torch.Tensor:
    """A message with room for n records from word ``BEGIN`` on, and three words more."""
    return torch.full((BEGIN + (n * (width + 2) + 1) // 2 + 3,), 77, dtype=torch.int64)


def records_in(message: torch.Tensor, n: int, width: int) -> torch.Tensor:
    floats = message[BEGIN:].view(torch.float32)[: n * (width + 2)]
    return floats.view(n, width + 2)


@pytest.mark.parametrize("states", [False, True])
def test_records(typed_table, states):
    group = typed_table._group
    slots = group.select_slots(0)[::3].clone()
    slots[::4] = -1
    is_new = marks(len(slots))
    width = group.tables[0].dim + 2 * states
    first, end = 2, len(slots) - 1
    message = message_for(end - first, width)
    at = (first, end, message, BEGIN)
    scores = ops.pack_records(group.handle, 0, slots, is_new, *at, states)
    assert (message[:BEGIN] == 77).all()
    assert (message[-3:] == 77).all()
    records = records_in(message, end - first, width)
    slots, is_new = slots[first:end], is_new[first:end]
    there = slots >= 0
    state = group.export_table(0)
    at = slots[there]
    values = torch.cat([numbers(typed_table, at), state.states[at]], dim=1)[:, :width]
    assert torch.equal(records[there, :width], values)
    words = records[:, width:].contiguous().view(torch.int32)
    assert torch.equal(words[there, 0], state.last_steps[at].int())
    assert torch.equal(words[there, 1], IS_HERE + WAS_HERE * (~is_new[there]).int())
    assert torch.equal(scores[there], state.scores[at])
    assert not records[~there].view(torch.int32).any()
    assert not scores[~there].any()


@pytest.mark.parametrize("highest", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_merged(typed_table, states, highest):
    group = typed_table._group
    before = group.export_table(0)
    slots = group.select_slots(0)[::2].clone()
    ids = before.ids[slots].clone()
    slots[::5] = -1
    n, dim = len(slots), group.tables[0].dim
    width = dim + 2 * states
    column = width - 1 if highest else -1
    known = marks(n)
    initial = group_initial(typed_table, ids)
    messages = [message_for(n, width) for _ in range(2)]
    records = [records_in(message, n, width) for message in messages]
    for record in records:
        record.normal_()
    words = [record[:, width:].view(torch.int32) for record in records]
    for word in words:
        word[:, 0] = torch.randint(2**31 - 1, (n,), dtype=torch.int32)
        word[:, 1] = IS_HERE + WAS_HERE * (torch.rand(n) < 0.5).int()
    for absent, record in ((slice(0, None, 5), 0), (slice(1, None, 5), 1)):
        records[record][absent] = 0
    own, theirs = (record.double() for record in records)
    flags = [word[:, 1].clone() for word in words]
    steps = torch.maximum(words[0][:, 0], words[1][:, 0])
    scores = torch.randint(1000, (n,))
    wanted = own[:, :width] + theirs[:, :width]
    for i in range(n):
        holders = sum(int(flag[i]) & IS_HERE for flag in flags)
        old = bool(known[i]) or any(int(flag[i]) & WAS_HERE for flag in flags)
        if not old and holders < 2:
            wanted[i, :dim] += initial[i]
        wanted[i] /= holders if old else 2
    if highest:
        wanted[:, column] = torch.maximum(own[:, column], theirs[:, column])
    # The surrounding elements belong to other parts.
    slots, ids, known = (torch.cat([part[-3:], part, part[:2]]) for part in (slots, ids, known))
    args = (slots, ids, known, 3, 3 + n, *messages, BEGIN, scores, states, column)
    ops.merge_records(*place(typed_table), *args)
    slots, ids, known = (part[3 : 3 + n] for part in (slots, ids, known))
    for message in messages:
        assert (message[:BEGIN] == 77).all()
        assert (message[-3:] == 77).all()
    after = group.export_table(0)
    there = slots >= 0
    at = slots[there]
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.int8: 0}
    dtype = group.tables[0].dtype
    minimum = wanted.abs().max() / 250 if dtype == torch.int8 else 1e-6
    rows = numbers(typed_table, at).double()
    torch.testing.assert_close(rows, wanted[there, :dim], rtol=rounding[dtype], atol=minimum)
    own_states = after.states[at].double()
    expected = wanted[there, dim:] if states else before.states[at].double()
    torch.testing.assert_close(own_states, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(after.last_steps[at].int(), steps[there])
    assert torch.equal(after.scores[at], scores[there])
    # Entries that this table lacks stay in the message, to be inserted later.
    kept = records[0][~there]
    torch.testing.assert_close(kept[:, :width].double(), wanted[~there], rtol=1e-6, atol=1e-6)
    assert torch.equal(kept[:, width].view(torch.int32), steps[~there])
    untouched = before.occupied.clone()
    untouched[at] = False
    for name in ("rows", "states", "last_steps", "scores"):
        same = (getattr(after, name)[untouched], getattr(before, name)[untouched])
        assert torch.equal(*(part.contiguous().view(torch.uint8) for part in same))


def group_initial(table, ids: torch.Tensor) -> torch.Tensor:
    """Initial rows in float64."""
    spec = table._group.tables[0]
    return initial_rows(
        ids, spec.dim, table=spec.name, seed=spec.seed, initializer=spec.initializer
    ).double()


def test_schemas(table):
    group = table._group
    ids, was = torch.zeros(40, dtype=torch.int64), marks(40)
    torch.library.opcheck(ops.compare_slots, (*place(table), 3, ids, was, None, 1, True, True))
    slots = group.select_slots(0)[:9]
    message = message_for(7, group.tables[0].dim + 2)
    at = (1, 8, message, BEGIN)
    torch.library.opcheck(ops.pack_records, (group.handle, 0, slots, marks(9), *at, True))
    ids, _, _, scores, _ = ops.read_slots(group.handle, 0, slots)
    at = (1, 8, message, message.clone(), BEGIN)
    args = (*place(table), slots, ids, marks(9), *at, scores[1:8], True, -1)
    torch.library.opcheck(ops.merge_records, args)


def test_bad_input(table):
    group = table._group
    maximum, width = table.num_slots, group.tables[0].dim + 2
    ids, was = torch.zeros(40, dtype=torch.int64), marks(40)
    with pytest.raises(
        ValueError, match=f"slots from {maximum - 39} to {maximum + 1} were asked for"
    ):
        ops.compare_slots(*place(table), maximum - 39, ids, was, None, 0, False, True)
    with pytest.raises(ValueError, match="ids must have 40 elements, but has 39"):
        ops.compare_slots(*place(table), 0, ids[1:], was, None, 0, False, True)
    slots = group.select_slots(0)[:9].clone()
    message, is_new = message_for(9, width), marks(9)
    words = len(message)
    with pytest.raises(
        ValueError, match=f"message has {words} words, but 9 records from 9 on take"
    ):
        ops.pack_records(group.handle, 0, slots, is_new, 0, 9, message, 9, True)
    for first, end in ((-1, 3), (4, 3), (2, 10)):
        with pytest.raises(
            ValueError, match=f"from {first} to {end} were asked for, but slots has"
        ):
            ops.pack_records(group.handle, 0, slots, is_new, first, end, message, 0, True)
    ids, _, _, scores, _ = ops.read_slots(group.handle, 0, slots)
    args = (ids, marks(9), 0, 9, message, message.clone(), BEGIN, scores, True)
    with pytest.raises(ValueError, match=f"highest_column is {width}, but must be -1 or one of"):
        ops.merge_records(*place(table), slots, *args, width)
    slots[3] = maximum
    with pytest.raises(ValueError, match=f"slots has {maximum}, but the table has {maximum}"):
        ops.merge_records(*place(table), slots, *args, -1)
