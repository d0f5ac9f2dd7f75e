"""Shards that must share a host are placed as TorchRec's partitioner does, and where it fails."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
)

from torchrec_hkv.planner.packing import ShardNeeds, fits, free_memory
from torchrec_hkv.planner.partitioner import SearchingPartitioner

pytestmark = pytest.mark.compat

_HOSTS, _PER_HOST = 3, 2
_KINDS = {
    "table_wise": "device",
    "row_wise": "uniform",
    "table_row_wise": "host",
    "table_column_wise": "host",
    "grid_shard": "multi_host",
}


def _option(name, sharding_type, parts):
    return ShardingOption(
        name=name,
        tensor=torch.empty(4, 4, device="meta"),
        module=("m", nn.Module()),
        input_lengths=[1.0],
        batch_size=8,
        sharding_type=sharding_type,
        partition_by=_KINDS[sharding_type],
        compute_kernel="fused",
        shards=[
            Shard([1, 1], [i, 0], Storage(hbm=size, ddr=0), Perf(time, 0, 0, 0))
            for i, (size, time) in enumerate(parts)
        ],
        is_pooled=True,
    )


def _count(draw, sharding_type):
    return {
        "table_wise": 1,
        "row_wise": _HOSTS * _PER_HOST,
        "table_row_wise": _PER_HOST,
        "table_column_wise": draw.randint(1, 3),
        "grid_shard": _PER_HOST * draw.randint(2, 4),
    }[sharding_type]


def _options(draw):
    options = []
    for at in range(draw.randint(7, 12)):
        kind = draw.choice(list(_KINDS))
        count = _count(draw, kind)
        size, time = draw.randint(1, 40), draw.uniform(1, 9)
        # Shards of a table have about equal sizes.
        options.append(_option(f"t{at}", kind, [(size, time)] * count))
    return options


def _topology(room):
    return Topology(
        world_size=_HOSTS * _PER_HOST,
        local_world_size=_PER_HOST,
        compute_device="cuda",
        hbm_cap=room,
        ddr_cap=0,
    )


def _placed(partitioner, options, room):
    """Time of each rank, or None if the shards do not fit."""
    for option in options:
        for shard in option.shards:
            shard.rank = None
    try:
        partitioner.partition(proposal=options, storage_constraint=_topology(room))
    except PlannerError:
        return None
    used, times = defaultdict(int), defaultdict(float)
    for option in options:
        for shard in option.shards:
            used[shard.rank] += shard.storage.hbm
            times[shard.rank] += shard.perf.total
    assert max(used.values()) <= room
    return times


def _check_hosts(option):
    """Shards are on ranks that the sharding type allows."""
    ranks = [shard.rank for shard in option.shards]
    hosts = [rank // _PER_HOST for rank in ranks]
    if option.partition_by == "uniform":
        assert ranks == list(range(_HOSTS * _PER_HOST))
    if option.sharding_type == "table_column_wise":
        assert len(set(hosts)) == 1
    if option.sharding_type in ("table_row_wise", "grid_shard"):
        blocks = [ranks[i : i + _PER_HOST] for i in range(0, len(ranks), _PER_HOST)]
        firsts = [block[0] for block in blocks]
        assert all(first % _PER_HOST == 0 for first in firsts)
        assert blocks == [list(range(first, first + _PER_HOST)) for first in firsts]
        for i in range(0, len(firsts), _HOSTS):
            assert len(set(firsts[i : i + _HOSTS])) == len(firsts[i : i + _HOSTS])


@pytest.mark.parametrize("seed", range(30))
def test_with_enough_memory_ranks_take_as_long_as_after_torchrecs_partitioner(seed):
    options = _options(random.Random(seed))
    stock = _placed(GreedyPerfPartitioner(), options, 10_000)
    ours = _placed(SearchingPartitioner(), options, 10_000)
    for option in options:
        _check_hosts(option)
    assert ours == pytest.approx(stock)


@pytest.mark.parametrize("seed", range(60))
def test_shards_fit_wherever_torchrecs_partitioner_places_them(seed):
    draw = random.Random(seed)
    options = _options(draw)
    total = sum(s.storage.hbm for option in options for s in option.shards)
    room = round(total / (_HOSTS * _PER_HOST) * draw.uniform(1.0, 1.3)) + 1
    stock = _placed(GreedyPerfPartitioner(), options, room)
    ours = _placed(SearchingPartitioner(), options, room)
    if ours is not None:
        for option in options:
            _check_hosts(option)
    assert ours is not None or stock is None


@pytest.mark.parametrize("seed", range(60))
def test_what_fits_does_not_depend_on_times(seed):
    draw = random.Random(seed)
    options = _options(draw)
    total = sum(s.storage.hbm for option in options for s in option.shards)
    rooms = free_memory(_topology(round(total / (_HOSTS * _PER_HOST) * draw.uniform(1.0, 1.2)) + 1))
    with_times = fits([ShardNeeds(option) for option in options], rooms)
    for option in options:
        for shard in option.shards:
            shard.perf = None
    assert fits([ShardNeeds(option) for option in options], rooms) == with_times


def test_blocks_that_do_not_fill_hosts_do_not_fit():
    options = [_option("t", "grid_shard", [(1, 1.0)] * (_PER_HOST + 1))]
    assert _placed(SearchingPartitioner(), options, 100) is None
