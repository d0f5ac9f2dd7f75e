"""The next sync notices entries that left without a lookup, however they left."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.replicas.changes import ReplicaChanges

IDS = torch.arange(100)


def lookup(group: TableGroup, ids: torch.Tensor) -> None:
    offsets = torch.tensor([0, len(ids)])
    anchor, rate = torch.empty(0, requires_grad=True), torch.full((), 0.1)
    group.train_lookup(anchor, ids, offsets, None, 1, False, rate).sum().backward()


@pytest.fixture(params=[None, 3], ids=["kept", "expiring"])
def group(request):
    spec = TableSpec("t", 500, 4, expire_after=request.param)
    group = TableGroup([spec], [0], RowWiseAdagrad(), torch.device("cpu"))
    lookup(group, IDS)
    return group


def erase(group):
    group.erase(IDS[20:50], torch.tensor([0, 30]), 1)
    return set(range(20, 50))


def clear(group):
    group.clear_table(0)
    return set(range(100))


def expire(group):
    if group.tables[0].expire_after is None:
        return set()
    for _ in range(80):
        lookup(group, IDS[:60])
    return set(range(60, 100))


@pytest.mark.parametrize("leave", [erase, clear, expire])
def test_each_is_noticed(group, leave):
    changes = ReplicaChanges(group, 0, 1 << 20)
    lookup(group, IDS[:10])
    assert sorted(changes.find_changes().touched.tolist()) == list(range(10))
    changes.on_sync()
    removed = leave(group)
    look = changes.find_changes()
    assert set(look.removed.tolist()) == removed
    changes.on_sync()
    assert changes.find_changes().removed.tolist() == []
