"""Several lookups may await their backwards at once, each with its own pin."""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv import _C
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform

INITIALIZER = Uniform(-1, 1)


def make(device: str, capacity: int = 64) -> TableGroup:
    """One full bucket takes 64 ids."""
    spec = TableSpec("t", capacity, 2, initializer=INITIALIZER)
    return TableGroup([spec], [0], SGD(), device=device)


def backward(out: torch.Tensor) -> None:
    out.backward(torch.ones_like(out))


def test_two_forwards_before_the_first_backward(device_type):
    """The first backward releases its own rows, but not those of the second lookup."""
    group = make(device_type)
    ids = random_ids(300).to(device_type)
    parts = [ids[:24], ids[24:56]]
    outs = [lookup(group, Bags.flat(part)) for part in parts]
    before = rows_by_id(group)
    insert(group, Bags.flat(ids[100:140]))  # 8 slots are free
    assert group.counters()[0]["refused"] == 32
    backward(outs[0])
    insert(group, Bags.flat(ids[200:300]))
    after = rows_by_id(group)
    assert set(parts[1].tolist()) <= after.keys()
    assert not set(parts[0].tolist()) & after.keys()
    assert len(after) == 64
    backward(outs[1])
    trained = rows_by_id(group)
    for id_ in parts[1].tolist():
        torch.testing.assert_close(trained[id_], before[id_] - 0.1)
    insert(group, Bags.flat(ids[:64]))
    assert rows_by_id(group).keys() == set(ids[:64].tolist())


def test_the_second_backward_first(device_type):
    """Rows looked up after the oldest pending lookup stay until that lookup's backward."""
    group = make(device_type)
    ids = random_ids(300).to(device_type)
    outs = [lookup(group, Bags.flat(part)) for part in (ids[:24], ids[24:64])]
    backward(outs[1])
    insert(group, Bags.flat(ids[100:164]))
    assert rows_by_id(group).keys() == set(ids[:64].tolist())
    backward(outs[0])
    insert(group, Bags.flat(ids[100:164]))
    assert rows_by_id(group).keys() == set(ids[100:164].tolist())


def test_an_id_in_both_batches(device_type):
    """An id in both batches stays until the later backward, and gets both gradients."""
    group = make(device_type)
    ids = random_ids(200).to(device_type)
    outs = [lookup(group, Bags.flat(ids[:40])), lookup(group, Bags.flat(ids[20:60]))]
    before = rows_by_id(group)
    backward(outs[0])
    insert(group, Bags.flat(ids[100:200]))
    after = rows_by_id(group)
    assert after.keys() > set(ids[20:60].tolist())
    assert not set(ids[:20].tolist()) & after.keys()
    backward(outs[1])
    trained = rows_by_id(group)
    for at, id_ in enumerate(ids[20:60].tolist(), 20):
        torch.testing.assert_close(trained[id_], before[id_] - (0.2 if at < 40 else 0.1))


def test_places_of_pins_are_used_again(device_type):
    """More lookups than pin slots, with two of them always pending."""
    group = make(device_type, capacity=256)
    waiting = []
    for _ in range(3 * _C.MAX_PINS):
        ids = random_ids(40).to(device_type)
        waiting.append((lookup(group, Bags.flat(ids)), ids, rows_by_id(group)))
        if len(waiting) < 3:
            continue
        out, ids, before = waiting.pop(0)
        backward(out)
        after = rows_by_id(group)
        for id_ in ids.tolist():
            torch.testing.assert_close(after[id_], before[id_] - 0.1)
    counters = group.counters()[0]
    assert counters["refused"] == 0
    assert counters["evicted"] > 0


def test_too_many_wait(device_type):
    group = make(device_type, capacity=256)
    bags = Bags.flat(random_ids(5).to(device_type))
    outs = [lookup(group, bags) for _ in range(_C.MAX_PINS)]
    clock = group.clock
    with pytest.raises(RuntimeError, match=r"^64 lookups of this group wait for their backward"):
        lookup(group, bags)
    assert group.clock == clock
    backward(outs.pop())
    outs.append(lookup(group, bags))
    del outs[3]
    outs.append(lookup(group, bags))


def test_a_pin_ends_once(device_type):
    """A second backward of a graph does not release the pin that reuses the first one's slot."""
    group = make(device_type)
    ids = random_ids(128).to(device_type)
    first = lookup(group, Bags.flat(ids[:5]))
    first.backward(torch.ones_like(first), retain_graph=True)
    second = lookup(group, Bags.flat(ids[5:64]))
    backward(first)
    del first
    backward(lookup(group, Bags.flat(ids[:5])))
    insert(group, Bags.flat(ids[64:]))
    assert rows_by_id(group).keys() >= set(ids[5:64].tolist())
    backward(second)


def test_a_pin_without_a_lookup(device_type):
    """A pin without a lookup holds its call's rows as long as it is referenced."""
    group = make(device_type)
    ids = random_ids(128).to(device_type)
    bags = Bags.flat(ids[:64])
    pin = group.pin()
    group.find_or_insert(bags.ids, bags.offsets, 1, pin)
    insert(group, Bags.flat(ids[64:]))
    assert group.counters()[0]["refused"] == 64
    del pin
    insert(group, Bags.flat(ids[64:]))
    assert group.counters()[0]["refused"] == 64
    assert rows_by_id(group).keys() == set(ids[64:].tolist())


def test_a_place_that_is_taken_and_left_unused(device_type):
    """An unused pin that took a previous pin's slot does not hold that pin's rows."""
    group = make(device_type)
    ids = random_ids(128).to(device_type)
    bags = Bags.flat(ids[:64])
    pin = group.pin()
    place = pin.number % _C.MAX_PINS
    group.find_or_insert(bags.ids, bags.offsets, 1, pin)
    del pin
    pin = group.pin()
    assert pin.number % _C.MAX_PINS == place
    del pin
    insert(group, Bags.flat(ids[64:]))
    assert group.counters()[0]["refused"] == 0
    assert rows_by_id(group).keys() == set(ids[64:].tolist())


def test_a_pin_outlives_its_group(device_type):
    group = make(device_type)
    pin = group.pin()
    del group
    assert pin.number >= _C.MAX_PINS
