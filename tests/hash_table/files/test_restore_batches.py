"""Restoring several batches at once equals restoring them one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.support.saved_tables import buckets_of, entries, filled, like
from torchrec_hkv import _C

ops = torch.ops.torchrec_hkv


def place(table):
    return table._group.counter_tensor, table._group.handle, 0


def geometry(table):
    """Number of buckets, and slots per bucket."""
    return _C.table_layout(table._group.handle, 0)[-2:]


def read(table, slots):
    return slots, *ops.read_slots(table._group.handle, 0, slots)


def shares(table, count):
    """All entries, in batches of ascending slots; each entry is in a random batch."""
    slots = table._group.select_slots(0).sort().values
    share = torch.randint(count, slots.shape)
    return [read(table, slots[share == number]) for number in range(count)]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "customized"])
@pytest.mark.parametrize("n", [0, 1, 9000])
@pytest.mark.parametrize("count", [1, 5])
def test_as_one_after_the_other(eviction, n, count):
    table = filled("cpu", n, 12_000, eviction=eviction, state_dim=3)
    batches = shares(table, count)
    together, apart = like(table), like(table)
    assert ops.restore_batches(*place(together), *map(list, zip(*batches, strict=True))) == 0
    for batch in batches:
        assert ops.restore_slots(*place(apart), *batch).all()
    assert entries(together) == entries(apart) == entries(table)
    assert ops.find_repeated(*place(together)) == -1


def test_the_first_batch_has_a_slot_that_two_name():
    table = filled("cpu", 900, 1000, dtype=torch.float32)
    (batch,) = shares(table, 1)
    slots, ids, rows, steps, scores, states = batch
    again = (slots[:7], ids[:7], rows[:7] + 1, steps[:7], scores[:7], states[:7])
    loaded = like(table)
    both = map(list, zip(batch, again, strict=True))
    assert ops.restore_batches(*place(loaded), *both) == 7
    assert entries(loaded) == entries(table)


def test_ids_are_not_put_into_buckets_of_others():
    table = filled("cpu", 900, 1000)
    (batch,) = shares(table, 1)
    slots, ids, *rest = batch
    moved = ids.clone()
    buckets, bucket_slots = geometry(table)
    bucket = int(slots[5]) // bucket_slots
    moved[5] = next(id_ for id_ in ids.tolist() if bucket not in buckets_of(id_, buckets))
    loaded = like(table)
    lost = ops.restore_batches(*place(loaded), *([part] for part in (slots, moved, *rest)))
    other = like(table)
    placed = ops.restore_slots(*place(other), slots, moved, *rest)
    assert lost == int((~placed).sum()) == 1


@pytest.mark.parametrize("slots", [[3, 2], [4, 4], [-1, 5], [5, 1 << 40]])
def test_slots_that_do_not_ascend_are_refused(slots):
    table = filled("cpu", 900, 1000)
    (batch,) = shares(table, 1)
    given = torch.tensor(slots), *(part[:2] for part in batch[1:])
    loaded = like(table)
    with pytest.raises(ValueError, match="slots of batch 0 must ascend"):
        ops.restore_batches(*place(loaded), *([part] for part in given))
    assert loaded.size == 0


@pytest.mark.parametrize("in_same", [True, False])
def test_an_id_in_two_slots_is_found(in_same):
    table = filled("cpu", 900, 1000)
    slots, ids, *rest = shares(table, 1)[0]
    taken, (buckets, size) = set(slots.tolist()), geometry(table)
    for at, (slot, id_) in enumerate(zip(slots.tolist(), ids.tolist(), strict=True)):
        other = buckets_of(id_, buckets) - {slot // size}
        bucket = slot // size if in_same or not other else other.pop()
        free = [k for k in range(size * bucket, size * bucket + size) if k not in taken]
        if free and (in_same or bucket != slot // size):
            again = slice(at, at + 1)
            break
    loaded = like(table)
    assert ops.restore_slots(*place(loaded), slots, ids, *rest).all()
    assert ops.find_repeated(*place(loaded)) == -1
    one = [part[again] for part in (ids, *rest)]
    assert ops.restore_slots(*place(loaded), torch.tensor(free[:1]), *one).all()
    assert ops.find_repeated(*place(loaded)) in (slot, free[0])


@pytest.mark.parametrize("change", [None, "slots", "ids", "owners"])
def test_placed_as_none_is_misplaced(change):
    table = filled("cpu", 900, 1000)
    slots, ids, *_ = shares(table, 1)[0]
    owners = (0, 1 << 16)
    if change == "slots":
        slots = slots.clone()
        slots[[3, 4]] = slots[[4, 3]]
    elif change == "ids":
        ids = ids.clone()
        bucket = int(slots[0]) // geometry(table)[1]
        ids[0] = next(k for k in range(1000) if bucket not in buckets_of(k, geometry(table)[0]))
    elif change == "owners":
        owners = (0, 1 << 15)
    args = (ids, slots, *geometry(table), *owners)
    ascends = bool((slots[1:] > slots[:-1]).all())
    assert ops.are_placed(*args) == (ascends and not ops.find_misplaced(*args).any())
    assert ops.are_placed(*args) == (change is None)
