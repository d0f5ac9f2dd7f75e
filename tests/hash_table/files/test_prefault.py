"""A table's pages are allocated before a load fills it."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.support.saved_tables import filled
from torchrec_hkv import _C
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.prefault import prefault_pages


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def new_table(rows: int, dim: int) -> FileTable:
    spec = TableSpec("t", rows, dim, "lru")
    group = TableGroup([spec], [0], RowWiseAdagrad(), torch.device("cpu"))
    return FileTable(group, 0, 1 << 20)


def test_pages_are_there():
    table = new_table(600_000, 64)
    before = resident_bytes()
    with prefault_pages(table, table.slots):
        for thread in threading.enumerate():
            if thread.name == "pages ahead":
                thread.join()
    grown = resident_bytes() - before
    if grown == 0:
        pytest.skip("the system does not take the advice")
    assert grown >= 0.9 * table.slots * 4 * 64


@pytest.mark.parametrize(("rows", "entries"), [(1000, 1000), (600_000, 50_000)])
def test_small_or_sparse_table(rows, entries):
    with prefault_pages(new_table(rows, 64), entries):
        assert all(thread.name != "pages ahead" for thread in threading.enumerate())


def test_ends_early():
    with pytest.raises(KeyError), prefault_pages(new_table(600_000, 64), 600_000):
        raise KeyError
    assert all(thread.name != "pages ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_contents_stay(eviction):
    table = filled("cpu", 400, 64, state_dim=2, eviction=eviction)
    group = table._group
    slots = group.select_slots(0).sort().values
    before = torch.ops.torchrec_hkv.read_slots(group.handle, 0, slots)
    _C.populate_slots(group.handle, 0, 0, table.num_slots)
    _C.populate_slots(group.handle, 0, 7, 7)
    after = torch.ops.torchrec_hkv.read_slots(group.handle, 0, slots)
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("first", "end"), [(-1, 5), (5, 4), (0, 1 << 40)])
def test_slots_out_of_range(first, end):
    table = filled("cpu", 400, 64)
    with pytest.raises(ValueError, match=f"slots from {first} to {end} were asked for"):
        _C.populate_slots(table._group.handle, 0, first, end)
