"""If no uniform pattern of tables fits, single tables are spread further."""

from __future__ import annotations

import itertools
import random

import pytest

from torchrec_hkv import _C

pytestmark = pytest.mark.compat

_HOSTS, _PER_HOST = 4, 2
_RANKS = _HOSTS * _PER_HOST


def _options(rows, buffer):
    """A table on one rank, on a host, or on all ranks; each shard has its own buffer."""
    return [
        _C.PlannerShardNeeds([(rows + buffer, 0, 0.0)], _C.PlannerSpread.ANY_RANK),
        _C.PlannerShardNeeds(
            [(rows // _PER_HOST + buffer, 0, 0.0)] * _PER_HOST, _C.PlannerSpread.HOST_RANKS
        ),
        _C.PlannerShardNeeds(
            [(rows // _RANKS + buffer, 0, 0.0)] * _RANKS, _C.PlannerSpread.ALL_RANKS
        ),
    ]


def _rooms(room):
    return _C.PlannerFreeMemory([room] * _RANKS, [0] * _RANKS, _PER_HOST)


def test_one_table_of_several_equal_ones_goes_to_all_ranks():
    # Blocks of 60 fill all hosts. A fifth must go to all ranks, where no more fit.
    tables = [_options(120, 5) for _ in range(_HOSTS + 1)]
    rooms = _rooms(65 + 120 // _RANKS + 5)
    chosen = rooms.fitting([_C.PlannerChoices(options) for options in tables])
    assert chosen is not None
    assert sorted(chosen) == [1, 1, 1, 1, 2]


def test_a_table_with_little_more_memory_then_is_spread():
    # Two tables exceed one host: the one with the smaller buffer is spread.
    tables = [_options(160, 1), *[_options(160, 40)] * _HOSTS]
    chosen = _rooms(145).fitting([_C.PlannerChoices(options) for options in tables])
    assert chosen == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_fits_and_most_of_what_fits_is_found(seed):
    draw = random.Random(seed)
    found = possible = 0
    for _ in range(10):
        tables = [_options(_RANKS * draw.randint(1, 40), draw.randint(1, 20)) for _ in range(5)]
        minimum = sum(min(option.hbm for option in options) for options in tables)
        rooms = _rooms(round(minimum / _RANKS * draw.uniform(1.05, 1.8)))
        chosen = rooms.fitting([_C.PlannerChoices(options) for options in tables])
        if chosen is not None:
            assert rooms.fits([own[at] for own, at in zip(tables, chosen, strict=True)])
        found += chosen is not None
        possible += any(rooms.fits(list(each)) for each in itertools.product(*tables))
    assert found <= possible
    assert found >= possible - 2
