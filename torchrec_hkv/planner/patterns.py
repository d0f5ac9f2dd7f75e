"""Combinations of options that are likely to fit, for many tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv.planner.packing import Parts

#: Number of steps between no table and all tables spread over all ranks.
_STEPS = 24


@dataclasses.dataclass(frozen=True)
class Sized:
    """An option with the needs of its shards."""

    option: ShardingOption
    parts: Parts


@dataclasses.dataclass(frozen=True)
class Corners:
    """The most economical options of a table.

    Attributes:
        whole: takes the least memory.
        spread: its largest shard takes the least memory.
        whole_in_host: takes the least HBM.
        spread_in_host: its largest shard takes the least HBM.
    """

    whole: Sized
    spread: Sized
    whole_in_host: Sized
    spread_in_host: Sized

    @classmethod
    def of(cls, options: Sequence[Sized]) -> Corners:
        """The corners among the options of a table."""
        return cls(
            *(
                min(options, key=lambda sized: sized.parts.size(in_hbm, first_largest))
                for in_hbm in (False, True)
                for first_largest in (False, True)
            )
        )


def spares(other: Sized, sized: Sized) -> bool:
    """Whether ``other`` fits wherever ``sized`` fits."""
    if other.parts.needs.spread != sized.parts.needs.spread:
        return False
    return other.parts.needs.fits_where(sized.parts.needs)


def spread_patterns(tables: Sequence[Corners], hbm: int, host: int) -> Iterator[list[Sized]]:
    """Combinations in which large tables are spread over ranks and small ones are on single ranks:
    with the least memory in total, with part of the tables in host memory, and with all of them.

    Args:
        tables: the corners of each table.
        hbm: HBM of all ranks.
        host: host memory of all ranks.
    """
    count = len(tables)
    order = sorted(
        range(count), key=lambda i: -(tables[i].whole.parts.hbm + tables[i].whole.parts.host)
    )
    position = [0] * count
    for place, index in enumerate(order):
        position[index] = place
    for moved in _moved(tables, order, hbm, host):
        before = -1
        for step in range(_STEPS + 1):
            end = count * step // _STEPS
            if end == before:
                continue
            before = end
            yield [
                _corner(corners, index in moved, position[index] < end)
                for index, corners in enumerate(tables)
            ]


def _corner(corners: Corners, in_host: bool, is_spread: bool) -> Sized:
    if in_host:
        return corners.spread_in_host if is_spread else corners.whole_in_host
    return corners.spread if is_spread else corners.whole


def _moved(
    tables: Sequence[Corners], order: Sequence[int], hbm: int, host: int
) -> Iterator[frozenset[int]]:
    """Sets of tables whose rows are in host memory: none, as many as needed, all."""
    yield frozenset()
    if not host:
        return
    movable = [
        index
        for index in order
        if tables[index].whole_in_host.parts.hbm < tables[index].whole.parts.hbm
    ]
    for largest_first in (True, False):
        moved: list[int] = []
        used_hbm = sum(corners.whole.parts.hbm for corners in tables)
        used_host = sum(corners.whole.parts.host for corners in tables)
        for index in movable if largest_first else reversed(movable):
            if used_hbm <= hbm:
                break
            before, after = tables[index].whole.parts, tables[index].whole_in_host.parts
            if used_host + after.host - before.host > host:
                continue
            used_hbm += after.hbm - before.hbm
            used_host += after.host - before.host
            moved.append(index)
        if 0 < len(moved) < len(movable):
            yield frozenset(moved)
    yield frozenset(movable)
