"""The call that replays many steps equals one call for each step."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, MinFrequency, TableGroup, TableSpec
from torchrec_hkv.hash_table.groups.counters import COUNTERS

EVICTED = COUNTERS.index("evicted")
#: Largest ratio between half-lives of a sampled and a full table.
NEAR = 1.002


def group_of(*evictions, admission=None):
    specs = [
        TableSpec(name=f"t{at}", capacity=rows, dim=1, eviction=eviction, admission=admission)
        for at, eviction in enumerate(evictions)
        for rows in (64, 500)
    ]
    return TableGroup(specs, list(range(len(specs))), None, device="cpu", state_dim=0)


def steps_of(number, maximum, distinct, seed=0):
    """Steps of different sizes, some empty. Each step has some new ids."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, maximum + 1, (number,), generator=generator)
    sizes[3] = 0
    draws = torch.rand(int(sizes.sum()), generator=generator) ** 3
    steps = torch.repeat_interleave(torch.arange(number), sizes)
    return (draws * distinct).long() * 7919 + 3 * steps, sizes.cumsum(0)


def split(ids, ends):
    return ids.tensor_split(ends[:-1])


def one_call_a_step(group, ids, ends, before=lambda step: None, after=lambda step: None):
    tables, slots, found = len(group.tables), [], []
    for step, part in enumerate(split(ids, ends)):
        repeated, offsets = part.repeat(tables), torch.arange(tables + 1) * len(part)
        before(step)
        found.append(group.find(repeated, offsets, 1).view(tables, -1) >= 0)
        slots.append(group.find_or_insert(repeated, offsets, 1).view(tables, -1))
        after(step)
    return torch.cat(slots, 1), torch.cat(found, 1)


def same(group, other):
    assert group.counters() == other.counters()
    bits = [g.aged_lfu.view(torch.int64) for g in (group, other)]
    assert torch.equal(*bits)
    for table in range(len(group.tables)):
        one, two = (g.export_table(table) for g in (group, other))
        assert torch.equal(one.occupied, two.occupied)
        for name in ("ids", "last_steps", "scores"):
            left, right = (getattr(state, name) for state in (one, two))
            if left.numel():  # no scores under LRU
                assert torch.equal(left[one.occupied], right[one.occupied])


@pytest.mark.parametrize("admission", [None, MinFrequency(2, entries=512)])
def test_slots_hits_and_tables(admission):
    groups = [group_of("lru", "lfu", AgedLFU(2.0), admission=admission) for _ in range(2)]
    for seed in range(2):
        ids, ends = steps_of(30, 90, 2000, seed)
        slots, found = _C.replay_steps(groups[0].handle, ids, ends, None, [], None, None)
        expected = one_call_a_step(groups[1], ids, ends)
        assert torch.equal(slots, expected[0])
        assert torch.equal(found, expected[1])
    same(*groups)


def test_epochs():
    groups = [group_of("epoch_lru", "epoch_lfu") for _ in range(2)]
    ids, ends = steps_of(40, 60, 1500)
    epochs = torch.arange(40) // 7
    slots, found = _C.replay_steps(groups[0].handle, ids, ends, epochs, [], None, None)
    expected = one_call_a_step(
        groups[1], ids, ends, lambda step: groups[1].set_epoch(int(epochs[step]))
    )
    assert torch.equal(slots, expected[0])
    assert torch.equal(found, expected[1])
    same(*groups)


@pytest.mark.parametrize("c", [None, 0.0, 3.0, float("inf")])
def test_half_lives(c):
    """Tables hold a tenth of the ids; all ids determine the half-lives."""
    groups = [group_of(AgedLFU(2.0 if c is None else c)) for _ in range(2)]
    whole = [[_C.SampledAging(10 * rows, c) for rows in (64, 500)] for _ in range(2)]
    all_ids, all_ends = steps_of(60, 3000, 8000)
    kept = all_ids % 10 == 0
    ids, ends = all_ids[kept], torch.cat([torch.zeros(1).long(), kept.cumsum(0)])[all_ends]
    slots, found = _C.replay_steps(
        groups[0].handle, ids, ends, None, list(enumerate(whole[0])), all_ids, all_ends
    )
    group = groups[1]
    looked_up = split(all_ids, all_ends)

    def before(step):
        for table, aging in enumerate(whole[1]):
            half_life = aging.begin_call()
            own, lookups, steps = group.aged_lfu[table, :3].tolist()
            if lookups == 0:
                continue
            wanted = half_life * lookups / (steps * group._group.present_slots(table))
            if wanted != own and not own / NEAR < wanted < own * NEAR:
                group.set_aging(table, wanted)

    def after(step):
        for table, aging in enumerate(whole[1]):
            aging.end_call(looked_up[step], int(group.counter_tensor[table, EVICTED]) != 0)

    expected = one_call_a_step(group, ids, ends, before, after)
    assert torch.equal(slots, expected[0])
    assert torch.equal(found, expected[1])
    assert [a.c for a in whole[0]] == [a.c for a in whole[1]]
    assert int(group.counter_tensor[0, EVICTED]) > 100
    same(*groups)


def test_bad_input():
    group = group_of("lru")
    ids = torch.arange(3)

    def call(*arguments):
        _C.replay_steps(group.handle, *arguments)

    with pytest.raises(ValueError, match="ends must rise up to 3, but have 5 behind 2"):
        call(ids, torch.tensor([2, 5]), None, [], None, None)
    with pytest.raises(ValueError, match="epochs must have 1 elements, but has 2"):
        call(ids, torch.tensor([3]), torch.tensor([0, 0]), [], None, None)
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        call(ids.int(), torch.tensor([3]), None, [], None, None)
    aging = [(0, _C.SampledAging(640, 2.0))]
    with pytest.raises(ValueError, match="tables that age need all ids of the log"):
        call(ids, torch.tensor([3]), None, aging, None, None)
    assert group.counters()[0]["lookups"] == 0
