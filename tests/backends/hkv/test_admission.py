"""Options of the backend ``hkv`` reach its tables: admission, expiry, strictness, memory of
evictions."""

import dataclasses

import pytest
import torch

from tests.support.shards import table_shard
from torchrec_hkv import HKVOptions, backends
from torchrec_hkv.backends import GroupLookup, OptimizerSpec
from torchrec_hkv.hash_table import MinFrequency

SGD = OptimizerSpec("sgd")


def make(device: str, *options: HKVOptions) -> GroupLookup:
    """A lookup with one table, and one feature, for each of the options."""
    shards = [
        table_shard(64, 4, its, name=f"t{table}", init_range=(-1.0, 1.0))
        for table, its in enumerate(options)
    ]
    tables = list(range(len(options)))
    return backends.get("hkv").create_lookup(shards, tables, SGD, torch.device(device))


def step(lookup: GroupLookup, ids: list[int], features: int = 1) -> torch.Tensor:
    """Forward and backward; each id is a bag."""
    device = lookup._group.device
    batch = torch.tensor(ids, device=device).repeat(features)
    offsets = torch.arange(len(batch) + 1, device=device)
    learning_rate = torch.full((), 0.5, device=batch.device)
    out = lookup(batch, offsets, None, len(ids), learning_rate)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    return out.detach()


def test_an_unadmitted_id_is_not_trained(device_type):
    lookup = make(device_type, HKVOptions(admission=MinFrequency(3, entries=100)))
    outs = [step(lookup, [-1, 2**62]) for _ in range(4)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    torch.testing.assert_close(outs[3], outs[0] - 0.5)
    counters = lookup.counters("t0")
    assert (counters["unadmitted"], counters["inserted"], counters["hits"]) == (4, 2, 2)


def test_evaluation_neither_counts_nor_expires(device_type):
    options = HKVOptions(admission=MinFrequency(2, entries=100), expire_after=1)
    lookup = make(device_type, options)
    step(lookup, [1, 1, 2])
    lookup.eval()
    for _ in range(5):
        step(lookup, [1, 2])
    counters = lookup.counters("t0")
    assert (counters["lookups"], counters["unadmitted"], counters["size"]) == (3, 1, 1)
    lookup.train()
    step(lookup, [2])
    assert lookup.counters("t0")["size"] == 2


def test_expiry(device_type):
    lookup = make(device_type, HKVOptions(expire_after=2), HKVOptions())
    first = step(lookup, [5], features=2)
    for _ in range(4):
        step(lookup, [6], features=2)
    assert [lookup.counters(name)["expired"] for name in ("t0", "t1")] == [1, 0]
    again = step(lookup, [5], features=2)
    assert torch.equal(again[0, :4], first[0, :4])  # a new row
    torch.testing.assert_close(again[0, 4:], first[0, 4:] - 0.5)


def test_strict(device_type):
    lookup = make(device_type, HKVOptions(strict=True), HKVOptions())
    with pytest.raises(RuntimeError, match=r"^Table 't0' is strict and had no place for 6 of this"):
        step(lookup, list(range(70)), features=2)
    step(lookup, list(range(64)), features=2)
    assert lookup.counters("t1")["refused"] == 6


def test_remember_evicted(device_type):
    """Only the table with the option counts returns; storage announces two bytes an entry for
    it."""
    options = (HKVOptions(remember_evicted=1 << 20), HKVOptions())
    lookup = make(device_type, *options)
    for first in (0, 40, 80, 120, 0):
        step(lookup, list(range(first, first + 40)), features=2)
    assert [lookup.counters(name)["returned"] for name in ("t0", "t1")] == [40, 0]
    taken = [sum(dataclasses.astuple(lookup.memory(name))) for name in ("t0", "t1")]
    assert taken[0] - taken[1] == 2 << 20
    backend = backends.get("hkv")
    counted = [
        sum(dataclasses.astuple(backend.storage(lookup._shards[name], SGD, device_type)))
        for name in ("t0", "t1")
    ]
    assert counted[0] - counted[1] == 2 << 20
