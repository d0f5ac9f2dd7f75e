"""Groups that are synced together share calls, and get the same content as when synced
separately."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import rows_by_id
from tests.support.thread_wire import ThreadWire, in_threads
from torchrec_hkv.hash_table import SGD, Adam, RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.replicas import (
    GroupSync,
    Synced,
    check_together,
    sync_together,
)

#: Optimizer, dims and policies of the tables of each group.
GROUPS = [
    (RowWiseAdagrad(), (4, 6), ("lru", "lfu")),
    (Adam(step_mode="row"), (3,), ("epoch_lfu",)),
    (SGD(), (5, 4), ("lru", "lru")),
]


class _CountingWire(ThreadWire):
    calls = 0

    def _all_reduce(self, tensor, op):
        self.calls += 1
        super()._all_reduce(tensor, op)

    def _all_gather(self, parts, tensor):
        self.calls += 1
        super()._all_gather(parts, tensor)

    def _send(self, tensor, number):
        self.calls += 1
        return super()._send(tensor, number)


def _made(swaps, replicas=2):
    """Wires, and the groups of each replica with their syncs."""
    wires = _CountingWire.make(replicas, swaps)
    groups = [
        [
            TableGroup(
                [TableSpec(f"t{t}", 400, dims[t], policies[t]) for t in range(len(dims))],
                list(range(len(dims))),
                optimizer,
                "cpu",
            )
            for optimizer, dims, policies in GROUPS
        ]
        for _ in wires
    ]
    syncs = [
        [GroupSync(group, range(len(group.tables)), wire) for group in own]
        for own, wire in zip(groups, wires, strict=True)
    ]
    return wires, groups, syncs


def _train(group, replica, step):
    tables = len(group.tables)
    generator = torch.Generator().manual_seed(100 * replica + step)
    ids = torch.randint(0, 300, (60 * tables,), generator=generator)
    offsets = torch.arange(tables + 1) * 60
    out = group.train_lookup(
        torch.empty(0, requires_grad=True), ids, offsets, None, 1, False, torch.tensor(0.1)
    )
    out.backward(torch.randn(out.shape, generator=generator))


@pytest.mark.parametrize(("replicas", "swaps"), [(2, True), (2, False), (3, False)])
def test_as_apart(replicas, swaps):
    results, calls = [], []
    for together in (True, False):
        wires, groups, syncs = _made(swaps, replicas)

        def sync(own, together=together):
            if together:
                return sync_together(own)
            return sum((one.sync() for one in own), Synced())

        for step in range(3):
            for replica, own in enumerate(groups):
                for at, group in enumerate(own):
                    for more in range(1 + at):  # their clocks differ
                        _train(group, replica, 10 * step + more)
            done = in_threads([lambda own=own: sync(own) for own in syncs])
            assert len({one.touched for one in done}) == 1
        results.append(
            [rows_by_id(group, t) for group in groups[0] for t in range(len(group.tables))]
        )
        calls.append(wires[0].calls)
        assert [group.clock for group in groups[0]] == [3, 6, 9]
    for rows, apart in zip(*results, strict=True):
        assert rows.keys() == apart.keys()
        assert all(torch.equal(rows[id_], apart[id_]) for id_ in rows)
    assert calls[0] <= calls[1] // 2


def test_a_pending_backward_is_named():
    _, groups, syncs = _made(True)
    anchor, rate = torch.empty(0, requires_grad=True), torch.tensor(0.1)
    ids, offsets = torch.arange(3), torch.tensor([0, 3])
    out = groups[1][1].train_lookup(anchor, ids, offsets, None, 1, False, rate)

    def refused(own):
        with pytest.raises(RuntimeError) as refusal:
            check_together(own)
        return str(refusal.value)

    first, second = in_threads([lambda own=own: refused(own) for own in syncs])
    assert first == second
    assert "in tables 't0' has not run, in replicas [1]" in first
    out.sum().backward()
    in_threads([lambda own=own: check_together(own) for own in syncs])


def test_averages_travel_together():
    wires = _CountingWire.make(2)
    tensors = [
        [torch.full((2, 3), float(rank)), torch.arange(4.0)[::2] + rank, torch.tensor(5.0 * rank)]
        for rank in range(2)
    ]
    tensors[0].append(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    tensors[1].append(torch.tensor([2.0, 4.0], dtype=torch.bfloat16))
    in_threads([lambda w=w, t=t: w.average(t) for w, t in zip(wires, tensors, strict=True)])
    for wire, own in zip(wires, tensors, strict=True):
        assert wire.calls == 1
        assert torch.equal(own[0], torch.full((2, 3), 0.5))
        assert own[1].tolist() == [0.5, 2.5]
        assert own[2].item() == 2.5
        assert own[3].tolist() == [1.5, 3.0]
        assert own[3].dtype == torch.bfloat16
