"""A load restores the clock and the epoch: later calls are newer than the save."""

import pytest
import torch

from tests.support.batches import rate
from tests.support.saved_tables import entries, filled, like
from tests.support.tables import distinct_ids
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, files


def test_steps_go_on(device_type, tmp_path):
    table = filled(device_type, eviction="epoch_lru")
    table.save(tmp_path)
    for begun in (0, 100):
        loaded = like(table)
        for _ in range(begun):
            loaded.find_or_insert(distinct_ids(1, device_type))
        loaded.load(tmp_path)
        assert loaded.epoch == table.epoch
        (id_,) = new = distinct_ids(1, device_type)
        loaded.find_or_insert(new)
        _, step, score, _ = entries(loaded)[int(id_)]
        assert step == table._group.clock + 1
        assert score == table.epoch << 32 | step


def test_a_late_clock(device_type, tmp_path):
    """Steps beyond 2^31."""
    table = filled(device_type, 0)
    table._group.set_clock(2**32 - 10)
    table.find_or_insert(distinct_ids(30, device_type))
    table.save(tmp_path)
    loaded = like(table)
    loaded.load(tmp_path)
    assert entries(loaded) == entries(table)
    assert {step for _, step, _, _ in entries(loaded).values()} == {2**32 - 9}
    assert loaded._group.clock == 2**32 - 9
    loaded = like(table, capacity=100)
    loaded.load(tmp_path)
    assert entries(loaded) == entries(table)


@pytest.mark.parametrize("clock", [-1, 2**32])
def test_impossible_clocks(clock):
    table = filled("cpu")
    with pytest.raises(ValueError, match=f"the clock is {clock}, but must be from 0 to 2"):
        table._group.set_clock(clock)


def test_a_backward_to_come_refuses_a_load(device_type, tmp_path):
    """A load is refused while a backward is pending, which would write to slots that other ids have
    by then."""
    group = TableGroup([TableSpec("t", 100, 4)], [0], SGD(), device=device_type)
    ids = torch.arange(5, device=device_type)
    offsets = torch.arange(6, device=device_type)
    anchor = torch.empty(0, device=device_type, requires_grad=True)
    files.save(group, 0, tmp_path)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, 5, pin)
    out = group.pooled_lookup(anchor, ids, offsets, None, slots, 5, False, pin, rate(0.1, group))
    with pytest.raises(ValueError, match="the backward of 1 lookups has not run"):
        files.load(group, 0, tmp_path)
    assert group.sizes() == [5]
    out.sum().backward()
    files.load(group, 0, tmp_path)
    assert group.sizes() == [0]
