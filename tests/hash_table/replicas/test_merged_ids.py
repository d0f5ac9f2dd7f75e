"""Compares the ids of all replicas with one replica's: the op and the GPU path agree with Python
dicts."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.saved_tables import filled
from torchrec_hkv.hash_table.replicas import ids as ids_of_replicas
from torchrec_hkv.hash_table.replicas.changes import ChangedIds, find_slots

ops = torch.ops.torchrec_hkv


@pytest.fixture(scope="module")
def table():
    return filled("cpu", 3000, 4000, state_dim=2)


def held_ids(table) -> torch.Tensor:
    state = table._group.export_table(0)
    return state.ids[state.occupied]


def in_order_of_slots(table, ids: list[int]) -> list[int]:
    slots = find_slots(table._group, 0, torch.tensor(ids, dtype=torch.int64)).tolist()
    assert -1 not in slots
    return [id_ for _, id_ in sorted(zip(slots, ids, strict=True))]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_all_that_is_asked(table, replicas, left, ordered, monkeypatch):
    generator = random.Random(torch.initial_seed())
    held = held_ids(table).tolist()
    for n in (0, 1, 9, 1500):
        foreign = [generator.randrange(-(2**63), 2**63) for _ in range(n)]
        own = generator.randrange(replicas)
        kinds = []
        for replica in range(replicas):
            # The pool is small, so that replicas share many ids.
            pool = held[: 2 * n + 2] + (foreign if replica != own else [])
            some = generator.sample(pool, n)
            cuts = sorted(generator.randrange(n + 1) for _ in range(2))
            its = [some[: cuts[0]], some[cuts[0] : cuts[1]], some[cuts[1] :] * left]
            if ordered and replica == own:
                its = [*(in_order_of_slots(table, ids) for ids in its[:2]), its[2]]
            kinds.append(its)
        order = dict.fromkeys(id_ for its in kinds for ids in its for id_ in ids)
        touched = {id_ for new, old, _ in kinds for id_ in new + old}
        known = {id_ for _, old, removed in kinds for id_ in old + removed}
        new, mine = kinds[own][0], [*kinds[own][0], *kinds[own][1]]
        slots = find_slots(table._group, 0, torch.tensor(mine, dtype=torch.int64))
        look = ChangedIds(torch.tensor(mine).long(), slots, len(new), torch.tensor([]).long(), None)
        joined = [torch.tensor([id_ for ids in its for id_ in ids]).long() for its in kinds]
        sizes = [[len(ids) for ids in its] for its in kinds]
        for path in (0, 1):
            if path:  # the path for GPUs and for very many ids
                monkeypatch.setattr(ids_of_replicas, "_MAX_HASHED", -1)
            met = ids_of_replicas.merge_ids(table._group, 0, look, joined, sizes, own)
            monkeypatch.undo()
            ids = met.ids.tolist()
            wanted = [id_ for id_ in order if id_ in touched]
            assert ids == (sorted(wanted) if path else wanted)
            assert met.in_last_sync.tolist() == [id_ in known for id_ in ids]
            assert met.touched.tolist() == [id_ in mine for id_ in ids]
            assert met.is_new.tolist() == [id_ in new for id_ in ids]
            assert sorted(met.removed.tolist()) == sorted(
                id_ for id_ in order if id_ not in touched
            )
            assert [ids[place] for place in met.touched_positions] == mine
            there = find_slots(table._group, 0, met.ids)
            assert torch.equal(met.slots, there)
            assert torch.equal(met.missing, (there < 0).nonzero().flatten())


def test_schema(table):
    handle, ids = table._group.handle, held_ids(table)[:9]
    slots = find_slots(table._group, 0, ids[:5])
    args = (handle, 0, [ids[:5], ids[3:]], [2, 3, 0, 1, 4, 1], 0, slots)
    torch.library.opcheck(ops.merge_ids, args)


def test_bad_input(table):
    handle, ids = table._group.handle, held_ids(table)[:9]
    slots = find_slots(table._group, 0, ids)
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        ops.merge_ids(handle, 0, [ids.int()], [9, 0, 0], 0, slots)
    with pytest.raises(ValueError, match="sizes has 2 elements, but must have three of each of 1"):
        ops.merge_ids(handle, 0, [ids], [9, 0], 0, slots)
    for sizes in ([4, 4, 0], [10, -1, 0]):
        with pytest.raises(ValueError, match="must not be negative, and add up to its 9 ids"):
            ops.merge_ids(handle, 0, [ids], sizes, 0, slots)
    with pytest.raises(ValueError, match="own is 1, but must be one of 1 replicas"):
        ops.merge_ids(handle, 0, [ids], [9, 0, 0], 1, slots)
    with pytest.raises(ValueError, match="slots must have 9 elements, but has 8"):
        ops.merge_ids(handle, 0, [ids], [9, 0, 0], 0, slots[1:])
    for wrong in (-1, table.num_slots):
        with pytest.raises(ValueError, match=f"slots has {wrong}, but the table has"):
            ops.merge_ids(handle, 0, [ids[:1]], [1, 0, 0], 0, torch.tensor([wrong]))
