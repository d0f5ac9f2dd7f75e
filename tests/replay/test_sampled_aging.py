"""A sample's half-lives equal those of the whole table, and so do the resulting hit rates."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ids import hashed, power_law
from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, HashTable
from torchrec_hkv.hash_table.groups.counters import COUNTERS
from torchrec_hkv.replay import Policy, TableSettings, replay
from torchrec_hkv.replay.arrays import ArrayLog

EVICTED = COUNTERS.index("evicted")


def batches(number, size, ids, shift):
    """Ids of which some are new in each batch, by ``shift``."""
    generator = torch.Generator().manual_seed(number * size)
    for at in range(number):
        draws = torch.rand(size, generator=generator) ** 3
        yield (draws * ids).long() + at * shift


@pytest.mark.parametrize("shift", [0, 7, 300])
@pytest.mark.parametrize("policy", ["adaptive", AgedLFU(2.0), AgedLFU(float("inf"))])
def test_half_lives_are_those_of_the_table(policy, shift):
    capacity = 4000
    table = HashTable(1, capacity, eviction=policy)
    group = table.group
    whole = _C.SampledAging(group.num_slots, policy.c if isinstance(policy, AgedLFU) else None)
    seen = set()
    for ids in batches(60, 1500, 10 * capacity, shift):
        half_life = whole.begin_call()
        group.find_or_insert(ids, torch.tensor([0, len(ids)]), 1)
        whole.end_call(ids, int(group.counter_tensor[0, EVICTED]) != 0)
        state = group.aged_lfu[0]
        assert whole.c == state[0]
        of_table = int(state[6].view(torch.int64))
        assert half_life == (float("inf") if of_table == -1 else of_table / 65536)
        seen.add(whole.c)
    assert len(seen) > (policy == "adaptive")  # c has been chosen anew


@pytest.mark.parametrize("power", [0.8, 1.1])
def test_hit_rates_of_a_sample(power):
    # A fifth of the ids is replaced in each fifth of the log, and one id has a fifth of all
    # lookups: it must not matter whether a sample has it.
    torch.manual_seed(int(10 * power))
    parts = []
    for fifth in range(5):
        at = power_law(300_000, 150_000, power, torch.device("cpu"))
        parts.append(hashed(at + 150_000 * ((at * 2654435761 % 1000003 + fifth) // 5)))
    ids = torch.cat(parts)
    ids[::5] = 12345
    log = ArrayLog("log", {"ids": ids.numpy()})
    policies = (Policy("adaptive"), Policy(AgedLFU(3.0)))
    tables = {"t": TableSettings(("ids",), (20_000, 40_000), policies)}
    full = replay(log, tables, batch_size=3000)["t"]
    sampled = replay(log, tables, batch_size=3000, sample=0.1)["t"]
    for curve, whole in zip(sampled.curves, full.curves, strict=True):
        assert curve.policy == whole.policy
        for point, expected in zip(curve.points, whole.points, strict=True):
            assert point.hit_rate == pytest.approx(expected.hit_rate, abs=0.005)
