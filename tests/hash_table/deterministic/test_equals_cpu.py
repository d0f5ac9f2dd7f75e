"""A deterministic group on a GPU keeps and evicts the same ids as one on a CPU, slot by slot."""

import pytest
import torch

from tests.support.batches import insert
from tests.support.gpu import NEEDS_GPU
from tests.support.power_law_bags import power_law_bags
from tests.support.table_states import assert_same_states
from torchrec_hkv.hash_table import (
    AgedLFU,
    MinFrequency,
    Probability,
    TableGroup,
    TableSpec,
    TruncatedNormal,
    Uniform,
)

pytestmark = NEEDS_GPU
# Slots of each table; the last two have few buckets, of fewer than 64 slots.
CAPACITIES, DIMS = (640, 64, 1000, 130, 5), (8, 4, 12, 3, 1)
OPTIONS = {
    "lru": {},
    "lfu": {"eviction": "lfu"},
    "epoch_lru": {"eviction": "epoch_lru"},
    "epoch_lfu": {"eviction": "epoch_lfu"},
    "aged_lfu": {"eviction": AgedLFU(0.5)},
    "adaptive": {"eviction": "adaptive"},
    "remembering": {"remember_evicted": 1000},
    "remembering few": {"remember_evicted": 7},
    "counted": {"admission": MinFrequency(2, entries=4096)},
    "counted in few cells": {"admission": MinFrequency(3, entries=24)},
    "halved": {"admission": MinFrequency(3, entries=64, halve_every=5)},
    "sketched": {"admission": MinFrequency(3, sketch_bytes=512)},
    "drawn": {"admission": Probability(0.3)},
    "expiring": {"expire_after": 4},
    "growing": {"initial_capacity": 5},
    "all": {
        "eviction": "lfu",
        "remember_evicted": 50,
        "admission": MinFrequency(2, entries=64),
        "expire_after": 9,
        "initial_capacity": 5,
        "initializer": TruncatedNormal(0.0, 1.0, -2.0, 2.0),
    },
}


def make(device, options):
    """Five tables and six features; the sixth feature is of the first table again."""
    specs = [
        TableSpec(
            f"t{t}",
            capacity,
            dim,
            **{"initializer": Uniform(-1, 1), "deterministic": True, **options},
        )
        for t, (capacity, dim) in enumerate(zip(CAPACITIES, DIMS, strict=True))
    ]
    return TableGroup(specs, [0, 1, 2, 3, 4, 0], device=device)


@pytest.mark.parametrize("options", OPTIONS)
def test_equal_slots_and_entries(options):
    gpu, cpu = (make(device, OPTIONS[options]) for device in ("cuda", "cpu"))
    pins = []
    for step in range(30):
        bags = power_law_bags(step, 6, 60, 3000)
        if options.startswith("epoch"):
            for group in (gpu, cpu):
                group.set_epoch((0, 3, 1, 2)[step // 4 % 4])
        pins = [*pins[-1:], (gpu.pin(), cpu.pin())] if step % 7 > 3 else []  # some are refused
        slots = []
        for group, pin in zip((gpu, cpu), pins[-1] if pins else (None, None), strict=True):
            its = bags.to(str(group.device))
            slots.append(group.find_or_insert(its.ids, its.offsets, its.batch_size, pin).cpu())
        assert torch.equal(*slots), step
        assert_same_states(gpu, cpu, step)
    counts = gpu.counters()
    if "admission" in OPTIONS[options]:
        assert all(table["unadmitted"] > 0 for table in counts)
        assert counts[1]["evicted"] > 0
    elif "expire_after" in OPTIONS[options]:
        assert counts[2]["expired"] > 0
        assert counts[1]["evicted"] > 0
    else:
        assert all(table["evicted"] > 0 for table in counts)
        assert counts[1]["refused"] > 0


@pytest.mark.parametrize("capacity", [1, 5, 64, 128, 200, 5000])
@pytest.mark.parametrize("ids", [1, 30, 700, 20_000, 300_000])
def test_batches_of_new_ids(ids, capacity):
    """All ids are new and occur three times; tables are much smaller or much larger than the
    batch."""
    groups = [
        TableGroup([TableSpec("t", capacity, 2, deterministic=True)], [0], device=device)
        for device in ("cuda", "cpu")
    ]
    generator = torch.Generator().manual_seed(ids)
    for step in range(3):
        new = torch.randperm(ids, generator=generator) + step * ids
        batch = new.repeat(3)[torch.randperm(3 * ids, generator=generator)]
        bounds = torch.tensor([0, len(batch)])
        slots = [
            group.find_or_insert(batch.to(group.device), bounds.to(group.device), 1).cpu()
            for group in groups
        ]
        assert torch.equal(*slots), step
    assert_same_states(*groups)


def test_one_id_many_times():
    """One id takes 99 % of the positions; others come between."""
    groups = [
        TableGroup([TableSpec("t", 64, 2, deterministic=True)], [0], device=device)
        for device in ("cuda", "cpu")
    ]
    ids = torch.full((1_000_000,), 7)
    ids[::10_000] = torch.arange(100, 200)
    bounds = torch.tensor([0, len(ids)])
    for step in range(2):
        slots = [
            group.find_or_insert((ids + step).to(group.device), bounds.to(group.device), 1).cpu()
            for group in groups
        ]
        assert torch.equal(*slots), step
    assert_same_states(*groups)


def test_other_groups_are_as_before():
    """A group without the option, beside a group with it, neither loses nor duplicates ids."""
    plain = TableGroup([TableSpec("t", 5000, 2)], [0], device="cuda")
    ordered = TableGroup([TableSpec("t", 5000, 2, deterministic=True)], [0], device="cuda")
    for step in range(5):
        bags = power_law_bags(step, 1, 500, 3000).to("cuda")
        for group in (plain, ordered):
            assert bool((insert(group, bags) >= 0).all())
    kept = [group.export_table(0) for group in (plain, ordered)]
    actual, expected = (state.ids[state.occupied].sort().values for state in kept)
    assert torch.equal(actual, expected)
