"""Incremental sums over plans that differ in few options equal the full sums."""

from __future__ import annotations

import random

import pytest

from torchrec_hkv.planner.packing import PlanSums

pytestmark = pytest.mark.compat


class _Parts:
    def __init__(self, draw):
        self.hbm, self.host, self.num_shards = (draw.randrange(1000) for _ in range(3))
        self.time = draw.random()


def test_sums():
    draw = random.Random(0)
    parts = {at: _Parts(draw) for at in range(500)}
    options = [object() for _ in parts]
    numbers = {id(option): at for at, option in enumerate(options)}
    sums = PlanSums(lambda option: parts[numbers[id(option)]])
    for count in (20, 20, 30):  # another number of tables means another model
        plan = draw.sample(options, count)
        for _ in range(100):
            for _ in range(draw.choice([0, 1, 3])):
                plan[draw.randrange(count)] = draw.choice(options)
            own = [parts[numbers[id(option)]] for option in plan]
            hbm, host, shards, time = sums.of(plan)
            assert hbm == sum(each.hbm for each in own)
            assert host == sum(each.host for each in own)
            assert shards == sum(each.num_shards for each in own)
            assert time == pytest.approx(sum(each.time for each in own), rel=1e-12)
