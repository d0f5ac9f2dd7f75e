"""Assigns shards to ranks: optimally for a few shards, else by TorchRec's greedy algorithm with a
search if that fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)

#: Up to this many shards, all assignments are compared.
_FEW_SHARDS = 6
#: Number of additional attempts to place a shard after which a search gives up.
_MOST_ATTEMPTS = 2000


class SearchingPartitioner(GreedyPerfPartitioner):
    """TorchRec's partitioner with a search, for options whose shards go to all ranks or to single
    ranks.

    A few shards are assigned so that the slowest rank is as fast as possible. Many shards are
    assigned as in TorchRec, the largest first, each to the rank with the least time so far. If a
    shard does not fit then, a bounded search tries other assignments.
    """

    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        hbm_per_device: int | None = None,
    ) -> list[ShardingOption]:
        """Assigns a rank to each shard.

        Args:
            proposal: one option for each table.
            storage_constraint: memory of the ranks.
            hbm_per_device: overrides the HBM of each rank, see TorchRec.

        Raises:
            PlannerError: no assignment was found.
        """
        if hbm_per_device is not None or not all(is_placed(option) for option in proposal):
            return super().partition(proposal, storage_constraint, hbm_per_device)
        if not place(proposal, storage_constraint, fast=True):
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message="No assignment of shards to ranks fits in the memory of all ranks.",
            )
        return proposal


@dataclasses.dataclass
class _Room:
    """The free memory of a rank, and the time of its tables."""

    rank: int
    hbm: int
    host: int
    time: float = 0.0

    def take(self, shard: Shard, sign: int = 1) -> None:
        storage = _storage(shard)
        self.hbm -= sign * storage.hbm
        self.host -= sign * storage.ddr
        self.time += sign * (0.0 if shard.perf is None else shard.perf.total)


def _storage(shard: Shard) -> Storage:
    return shard.storage or Storage(0, 0)


def is_placed(option: ShardingOption) -> bool:
    """Whether :func:`place` supports the way in which the option's shards are assigned."""
    kind = option.partition_by
    is_free = kind == PartitionByType.DEVICE.value and option.dependency is None
    return kind == PartitionByType.UNIFORM.value or is_free


def place(proposal: Sequence[ShardingOption], topology: Topology, fast: bool = False) -> bool:
    """Assigns each shard to a rank with enough memory; returns False if it finds no assignment.

    Args:
        proposal: one option for each table.
        topology: memory of the ranks.
        fast: whether to minimize the time of the slowest rank.
    """
    rooms = [_Room(each.rank, each.storage.hbm, each.storage.ddr) for each in topology.devices]
    free: list[Shard] = []
    for option in proposal:
        if not is_placed(option):
            return False
        if option.partition_by == PartitionByType.UNIFORM.value:
            for room, shard in zip(rooms, option.shards, strict=True):
                shard.rank = room.rank
                room.take(shard)
        else:
            free += option.shards
    if any(room.hbm < 0 or room.host < 0 for room in rooms):
        return False
    needs = [_storage(shard) for shard in free]
    if sum(need.hbm for need in needs) > sum(room.hbm for room in rooms):
        return False
    if sum(need.ddr for need in needs) > sum(room.host for room in rooms):
        return False
    free.sort(key=lambda shard: -max(_storage(shard).hbm, _storage(shard).ddr))
    if fast and len(free) <= _FEW_SHARDS:
        return _fastest(free, rooms)
    return (fast and _search(free, rooms, _by_time)) or _search(free, rooms, _by_room)


def _fastest(shards: list[Shard], rooms: list[_Room]) -> bool:
    """Branch and bound over all assignments."""
    best, ranks = math.inf, None
    taken: list[_Room] = []

    def go_on() -> None:
        nonlocal best, ranks
        time = max(room.time for room in rooms)
        if time >= best:
            return
        if len(taken) == len(shards):
            best, ranks = time, [room.rank for room in taken]
            return
        shard = shards[len(taken)]
        for room in _fitting(shard, rooms, _by_time):
            room.take(shard)
            taken.append(room)
            go_on()
            taken.pop().take(shard, -1)

    go_on()
    for shard, rank in zip(shards, ranks or (), strict=False):
        shard.rank = rank
    return ranks is not None


def _by_time(room: _Room) -> tuple[float, ...]:
    return (room.time, room.rank)


def _by_room(room: _Room) -> tuple[float, ...]:
    return (-room.hbm, -room.host, room.time, room.rank)


def _fitting(
    shard: Shard, rooms: list[_Room], order: Callable[[_Room], tuple[float, ...]]
) -> list[_Room]:
    """Ranks with enough memory for a shard, in a given order."""
    need = _storage(shard)
    fitting = [room for room in rooms if room.hbm >= need.hbm and room.host >= need.ddr]
    # Ranks with equal memory and time are interchangeable.
    distinct = {(room.hbm, room.host, room.time): room for room in reversed(fitting)}
    return sorted(distinct.values(), key=order)


def _search(
    shards: list[Shard], rooms: list[_Room], order: Callable[[_Room], tuple[float, ...]]
) -> bool:
    """Depth-first search, the largest shards first, with ranks in a given order. If it fails, rooms
    are unchanged."""
    orders: list[list[_Room]] = []  # for each shard, the ranks that are still to be tried
    taken: list[_Room] = []
    for _ in range(len(shards) + _MOST_ATTEMPTS):
        if len(taken) == len(shards):
            return True
        shard = shards[len(taken)]
        if len(orders) == len(taken):
            orders.append(_fitting(shard, rooms, order)[::-1])
        if orders[-1]:
            room = orders[-1].pop()
            room.take(shard)
            shard.rank = room.rank
            taken.append(room)
            continue
        orders.pop()
        if not taken:
            return False
        taken.pop().take(shards[len(taken)], -1)
    for shard, room in zip(shards, taken, strict=False):
        room.take(shard, -1)
    return False
