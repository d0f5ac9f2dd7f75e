"""Shards that do not fit on the rank with the most free memory are exchanged with others."""

from __future__ import annotations

import random

import pytest

from torchrec_hkv import _C

pytestmark = pytest.mark.compat

_RANKS = 8


def _parts(hbm, host=0):
    return _C.PlannerShardNeeds([(hbm, host, 0.0)], _C.PlannerSpread.ANY_RANK)


def _left(sizes, placement, room):
    left = [list(room) for _ in range(_RANKS)]
    for (hbm, host), (rank,) in zip(sizes, placement, strict=True):
        left[rank][0] -= hbm
        left[rank][1] -= host
    return left


def _largest_first(sizes, room):
    """Whether all shards fit if each goes to the rank with the most free memory, largest first."""
    left = [room] * _RANKS
    for size in sorted(sizes, reverse=True):
        rank = left.index(max(left))
        left[rank] -= size
    return min(left) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_many_shards_that_just_fit(seed):
    draw = random.Random(seed)
    # The largest shards fill most of a rank.
    sizes = [int(1e9 * (i + 1) ** -1.1 * draw.uniform(0.3, 1)) for i in range(8, 96)]
    room = sum(sizes) // _RANKS + 200_000
    while _largest_first(sizes, room):
        sizes = [int(1e9 * (i + 1) ** -1.1 * draw.uniform(0.3, 1)) for i in range(8, 96)]
        room = sum(sizes) // _RANKS + 200_000
    rooms = _C.PlannerFreeMemory([room] * _RANKS, [0] * _RANKS, _RANKS)
    placement = rooms.pack([_parts(size) for size in sizes], False)
    assert placement is not None
    assert min(map(min, _left([(size, 0) for size in sizes], placement, (room, 0)))) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_both_kinds_of_memory_suffice_afterwards(seed):
    draw = random.Random(seed)
    sizes = [(draw.randint(0, 1000), draw.randint(0, 1000)) for _ in range(100)]
    room = [sum(of) // _RANKS + 60 for of in zip(*sizes, strict=True)]
    rooms = _C.PlannerFreeMemory([room[0]] * _RANKS, [room[1]] * _RANKS, _RANKS)
    placement = rooms.pack([_parts(*size) for size in sizes], False)
    assert placement is not None
    assert min(map(min, _left(sizes, placement, room))) >= 0


def test_what_can_not_fit_does_not():
    rooms = _C.PlannerFreeMemory([10] * _RANKS, [0] * _RANKS, _RANKS)
    assert rooms.pack([_parts(6) for _ in range(_RANKS)], False) is not None
    assert rooms.pack([_parts(6) for _ in range(_RANKS + 1)], False) is None
