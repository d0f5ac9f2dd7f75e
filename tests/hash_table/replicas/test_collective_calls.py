"""A sync of many tables makes as many calls as a sync of one."""

from __future__ import annotations

import pytest
import torch

from tests.support.thread_wire import ThreadWire, in_threads
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.replicas import GroupSync


class _CountingWire(ThreadWire):
    """Counts calls that send data."""

    calls = 0
    largest = 0

    def _all_reduce(self, tensor, op):
        self.calls += 1
        super()._all_reduce(tensor, op)

    def _all_gather(self, parts, tensor):
        self.calls += 1
        super()._all_gather(parts, tensor)

    def _send(self, tensor, number):
        self.calls += 1
        if number:  # otherwise they are ids
            self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return super()._send(tensor, number)


def _synced(tables: int, eviction: str, batch_bytes: int, swaps: bool) -> list[_CountingWire]:
    wires = _CountingWire.make(2, swaps)
    specs = [TableSpec(f"t{t}", 500, 4 + t, eviction) for t in range(tables)]
    features = list(range(tables))
    groups = [TableGroup(specs, features, RowWiseAdagrad(), "cpu") for _ in wires]
    syncs = [GroupSync(g, features, w, batch_bytes) for g, w in zip(groups, wires, strict=True)]
    _train_and_sync(groups, syncs, 100)
    return wires


def _train_and_sync(groups: list[TableGroup], syncs: list[GroupSync], each: int) -> None:
    """Each replica looks up this many ids of each table; the other looks up half of them, too."""
    tables = len(groups[0].tables)
    for first, group in enumerate(groups):
        ids = torch.arange(each).repeat(tables) + each // 2 * first
        offsets = torch.arange(tables + 1) * each
        anchor = torch.empty(0, requires_grad=True)
        out = group.train_lookup(anchor, ids, offsets, None, 1, False, torch.tensor(0.1))
        out.sum().backward()
    for done in in_threads([sync.sync for sync in syncs]):
        assert done.touched == each * 3 // 2 * tables


def _calls(tables: int, eviction: str, batch_bytes: int, swaps: bool = False) -> list[int]:
    return [wire.calls for wire in _synced(tables, eviction, batch_bytes, swaps)]


@pytest.mark.parametrize(("eviction", "reductions"), [("lru", 2), ("lfu", 3)])
def test_calls_do_not_grow_with_tables(eviction, reductions):
    for tables in (1, 5):
        # Calls: clocks and sizes; ids; rows, maxima and, where counts add up, counts.
        assert _calls(tables, eviction, 64 << 20) == [2 + reductions] * 2


def test_rows_travel_in_rounds_that_fit():
    # 150 ids of each table, of 44 to 60 bytes: 39,000 in all, at most 9,000 at a time.
    assert _calls(5, "lru", 4 * 9000) == [2 + 2 * 5] * 2


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_messages_do_not_grow_with_tables(eviction):
    for tables in (1, 5):
        # Calls: clocks and sizes; ids; all other data.
        assert _calls(tables, eviction, 64 << 20, swaps=True) == [3] * 2


def test_messages_fit():
    # 150 ids of each table, of 28 to 44 bytes: 27,000 bytes, in messages of at most 3200. Memory
    # holds three of them, and what two are exchanged for.
    for wire in _synced(5, "lru", 16 * 2000, swaps=True):
        assert 2000 < wire.largest <= 3200
        assert 9 + 2 <= wire.calls <= 15 + 2


@pytest.mark.parametrize(("swaps", "rows"), [(False, 2), (True, 1)])
def test_ids_travel_with_their_numbers(swaps, rows):
    wires = _CountingWire.make(2, swaps)
    groups = [
        TableGroup([TableSpec("t", 5000, 4, "lru")], [0], RowWiseAdagrad(), "cpu") for _ in wires
    ]
    syncs = [GroupSync(g, [0], w) for g, w in zip(groups, wires, strict=True)]
    # The first message has room for the previous sync's data and an eighth more.
    for each, calls in ((100, 2), (112, 1), (100, 1), (40, 1), (46, 2), (0, 1), (2, 2), (2, 1)):
        before = [wire.calls for wire in wires]
        _train_and_sync(groups, syncs, each)
        rounds = calls + rows * (each > 0)
        assert [wire.calls - then for wire, then in zip(wires, before, strict=True)] == [rounds] * 2
