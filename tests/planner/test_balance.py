"""If memory restricts the placement of shards, they are moved until ranks take about equally
long."""

from __future__ import annotations

import itertools
import random

import pytest

from torchrec_hkv import _C

pytestmark = pytest.mark.compat

_RANKS = 8


def _parts(size, time):
    return _C.PlannerShardNeeds([(size, 0, time)], _C.PlannerSpread.ANY_RANK)


def _rooms(room, ranks=_RANKS):
    return _C.PlannerFreeMemory([room] * ranks, [0] * ranks, ranks)


def _sums(values, placement, ranks=_RANKS):
    sums = [0.0] * ranks
    for value, (rank,) in zip(values, placement, strict=True):
        sums[rank] += value
    return sums


def _case(seed):
    """Sizes follow a power law, times are independent of them, and memory is barely sufficient."""
    draw = random.Random(seed)
    sizes = [int(1e9 * (i + 20) ** -1.3) for i in range(200)]
    draw.shuffle(sizes)
    times = [draw.uniform(0.01, 0.3) for _ in sizes]
    return sizes, times, round(sum(sizes) / _RANKS * draw.uniform(1.002, 1.05))


@pytest.mark.parametrize("seed", range(20))
def test_many_shards_in_little_memory(seed):
    sizes, times, room = _case(seed)
    parts = [_parts(size, time) for size, time in zip(sizes, times, strict=True)]
    placement = _rooms(room).pack(parts, True)
    assert placement is not None
    assert max(_sums(sizes, placement)) <= room
    assert max(_sums(times, placement)) <= 1.05 * sum(times) / _RANKS
    # The returned plan takes no longer than estimated.
    assert max(_sums(times, placement)) <= _rooms(room).fastest(parts) * (1 + 1e-12)


def test_several_slow_shards_are_swapped_for_a_large_one():
    # By size, the large one is placed first, and the small ones fill the other rank.
    sizes, times = [100, *[10] * 10], [0.0, *[1.0] * 10]
    placement = _rooms(100, 2).pack(
        [_parts(*each) for each in zip(sizes, times, strict=True)], True
    )
    assert sorted(_sums(sizes, placement, 2)) == [100, 100]  # nothing can be moved
    sizes, times = [60, 40, *[10] * 10], [0.0, 0.0, *[1.0] * 10]
    placement = _rooms(100, 2).pack(
        [_parts(*each) for each in zip(sizes, times, strict=True)], True
    )
    assert max(_sums(times, placement, 2)) == 6.0


@pytest.mark.parametrize("seed", range(30))
def test_about_as_fast_as_the_best_of_all_assignments(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 30) for _ in range(9)]
    times = [draw.uniform(1, 9) for _ in sizes]
    room = sum(sizes) // 3 + draw.randint(1, 8)
    placement = _rooms(room, 3).pack(
        [_parts(*each) for each in zip(sizes, times, strict=True)], True
    )
    every = ([[rank] for rank in ranks] for ranks in itertools.product(range(3), repeat=len(sizes)))
    fit = (ranks for ranks in every if max(_sums(sizes, ranks, 3)) <= room)
    best = min((max(_sums(times, ranks, 3)) for ranks in fit), default=None)
    assert (placement is None) == (best is None)
    if placement is not None:
        assert max(_sums(sizes, placement, 3)) <= room
        assert max(_sums(times, placement, 3)) <= 1.35 * best
