"""With few shards, the placement minimises the slowest rank's time; with many, all shards fit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
)

from torchrec_hkv.planner.partitioner import SearchingPartitioner

pytestmark = pytest.mark.compat

_RANKS = 3


def _option(name, sizes, times, kind):
    shards = [
        Shard([1, 1], [i, 0], Storage(hbm=0, ddr=size), Perf(time, 0, 0, 0))
        for i, (size, time) in enumerate(zip(sizes, times, strict=True))
    ]
    return ShardingOption(
        name=name,
        tensor=torch.empty(4, 4, device="meta"),
        module=("m", nn.Module()),
        input_lengths=[1.0],
        batch_size=8,
        sharding_type="row_wise" if kind == PartitionByType.UNIFORM.value else "table_wise",
        partition_by=kind,
        compute_kernel="fused",
        shards=shards,
        is_pooled=True,
    )


def _topology(room):
    return Topology(world_size=_RANKS, local_world_size=_RANKS, compute_device="cpu", ddr_cap=room)


def _placed(partitioner, options, room):
    """Bytes and times of the ranks, or None if the shards do not fit."""
    try:
        partitioner.partition(proposal=options, storage_constraint=_topology(room))
    except PlannerError:
        return None
    used, times = [0] * _RANKS, [0.0] * _RANKS
    for option in options:
        for shard in option.shards:
            used[shard.rank] += shard.storage.ddr
            times[shard.rank] += shard.perf.total
    assert max(used) <= room
    return max(times)


def _best(free, uniform, room):
    best = None
    for ranks in itertools.product(range(_RANKS), repeat=len(free)):
        used, times = [uniform[0]] * _RANKS, [uniform[1]] * _RANKS
        for (size, time), rank in zip(free, ranks, strict=True):
            used[rank] += size
            times[rank] += time
        if max(used) <= room and (best is None or max(times) < best):
            best = max(times)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_few_shards(seed):
    draw = random.Random(seed)
    free = [(draw.randint(1, 40), draw.uniform(1, 9)) for _ in range(draw.randint(1, 6))]
    uniform = (draw.randint(0, 10), draw.uniform(0, 3))
    room = draw.randint(10, 90)
    options = [_option("u", [uniform[0]] * _RANKS, [uniform[1]] * _RANKS, "uniform")]
    options += [_option(f"d{i}", [s], [t], "device") for i, (s, t) in enumerate(free)]
    best = _best(free, uniform, room)
    placed = _placed(SearchingPartitioner(), options, room)
    assert placed == (best if best is None else pytest.approx(best))


def test_many_shards_find_room_that_the_greedy_choice_leaves():
    # Capacity 60 each: the greedy choice spreads the larger shards.
    sizes = [31, 31, 31, 29, 29, 29, 0, 0, 0]
    times = [1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    options = [
        _option(f"d{i}", [s], [t], "device")
        for i, (s, t) in enumerate(zip(sizes, times, strict=True))
    ]
    assert _placed(SearchingPartitioner(), options, 60) is not None
    assert _placed(SearchingPartitioner(), options, 59) is None


@pytest.mark.parametrize("seed", range(30))
def test_many_shards_fit_wherever_the_greedy_choice_does(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 30) for _ in range(9)]
    room = sum(sizes) // _RANKS + draw.randint(0, 6)
    options = [_option(f"d{i}", [s], [1.0], "device") for i, s in enumerate(sizes)]
    free = [(size, 1.0) for size in sizes]
    greedy = _placed(GreedyPerfPartitioner(), options, room)
    for option in options:
        option.shards[0].rank = None
    placed = _placed(SearchingPartitioner(), options, room)
    assert (placed is None) == (_best(free, (0, 0.0), room) is None)
    if greedy is not None:
        assert placed <= greedy
