"""Packs shards into the memory of ranks. Works on plain numbers, as searches call it often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchrec.distributed.planner.types import PartitionByType, ShardingOption, Topology

#: Up to this many shards, all assignments are compared.
FEW_SHARDS = 6
#: Number of additional attempts to place a shard after which a search gives up.
_MOST_ATTEMPTS = 2000
#: Number of shards above which a search makes fewer additional attempts.
_MANY_SHARDS, _FEWER_ATTEMPTS = 64, 200


class Need(NamedTuple):
    """What a shard needs of a rank.

    Attributes:
        hbm: bytes of HBM.
        host: bytes of host memory.
        time: time of a step.
    """

    hbm: int
    host: int
    time: float


class Parts:
    """The needs of an option's shards.

    Attributes:
        needs: by shard.
        is_placed: see :func:`is_placed`.
        is_uniform: whether the shards go to all ranks, in order.
        hbm: bytes of HBM over all shards.
        host: bytes of host memory over all shards.
        time: time of a step over all shards.
    """

    __slots__ = ("hbm", "host", "is_placed", "is_uniform", "needs", "time")

    def __init__(self, option: ShardingOption) -> None:
        """
        Args:
            option: with the memory of its shards.
        """
        self.needs = [
            Need(
                0 if shard.storage is None else shard.storage.hbm,
                0 if shard.storage is None else shard.storage.ddr,
                0.0 if shard.perf is None else shard.perf.total,
            )
            for shard in option.shards
        ]
        self.is_placed = is_placed(option)
        self.is_uniform = option.partition_by == PartitionByType.UNIFORM.value
        self.hbm = sum(need.hbm for need in self.needs)
        self.host = sum(need.host for need in self.needs)
        self.time = sum(need.time for need in self.needs)


class Rooms:
    """The free memory of the ranks, and the times of their tables.

    Attributes:
        hbm: free bytes of HBM by rank.
        host: free bytes of host memory by rank.
        time: time of a step by rank.
    """

    __slots__ = ("hbm", "host", "time")

    def __init__(self, hbm: list[int], host: list[int]) -> None:
        """
        Args:
            hbm: free bytes of HBM by rank.
            host: free bytes of host memory by rank.
        """
        self.hbm, self.host, self.time = hbm, host, [0.0] * len(hbm)

    @classmethod
    def of(cls, topology: Topology) -> Rooms:
        """The memory of a topology."""
        return cls(
            [device.storage.hbm for device in topology.devices],
            [device.storage.ddr for device in topology.devices],
        )

    def take(self, rank: int, need: Need) -> None:
        """Takes what a shard needs."""
        self.hbm[rank] -= need.hbm
        self.host[rank] -= need.host
        self.time[rank] += need.time

    def free(self, rank: int, need: Need, time: float) -> None:
        """Undoes :meth:`take`.

        Args:
            rank: the rank.
            need: of the shard.
            time: of the rank before.
        """
        self.hbm[rank] += need.hbm
        self.host[rank] += need.host
        self.time[rank] = time

    def first(self, need: Need, by_time: bool) -> int | None:
        """The first rank with enough memory in the order of :meth:`fitting`; None without any."""
        found = None
        hbm, host, time = self.hbm, self.host, self.time
        need_hbm, need_host, _ = need
        for rank in range(len(hbm)):
            if hbm[rank] < need_hbm or host[rank] < need_host:
                continue
            if found is None:
                found = rank
            elif by_time:
                if time[rank] < time[found]:
                    found = rank
            elif (-hbm[rank], -host[rank], time[rank]) < (-hbm[found], -host[found], time[found]):
                found = rank
        return found

    def fitting(self, need: Need, by_time: bool) -> list[int]:
        """Ranks with enough memory for a shard: by their time, or the emptiest first. Of ranks with
        equal memory and time only one is listed."""
        distinct = {
            (self.hbm[rank], self.host[rank], self.time[rank]): rank
            for rank in range(len(self.hbm) - 1, -1, -1)
            if self.hbm[rank] >= need.hbm and self.host[rank] >= need.host
        }
        if by_time:
            return sorted(distinct.values(), key=lambda rank: (self.time[rank], rank))
        return sorted(
            distinct.values(),
            key=lambda rank: (-self.hbm[rank], -self.host[rank], self.time[rank], rank),
        )


def is_placed(option: ShardingOption) -> bool:
    """Whether :func:`pack` supports the way in which the option's shards are assigned."""
    kind = option.partition_by
    is_free = kind == PartitionByType.DEVICE.value and option.dependency is None
    return kind == PartitionByType.UNIFORM.value or is_free


def pack(proposal: Sequence[Parts], rooms: Rooms, fast: bool = False) -> list[list[int]] | None:
    """Assigns each shard to a rank with enough memory.

    Args:
        proposal: one option for each table.
        rooms: the free memory of the ranks; changed.
        fast: whether to minimize the time of the slowest rank.

    Returns:
        The index of a rank for each shard of each option; None if no assignment was found.
    """
    everywhere = list(range(len(rooms.hbm)))
    ranks: list[list[int]] = []
    free: list[tuple[Need, list[int], int]] = []
    hbm = host = 0
    for parts in proposal:
        if parts.is_uniform:
            for rank, need in zip(everywhere, parts.needs, strict=True):
                rooms.take(rank, need)
            ranks.append(everywhere)
        else:
            ranks.append(own := [0] * len(parts.needs))
            free += [(need, own, index) for index, need in enumerate(parts.needs)]
            hbm, host = hbm + parts.hbm, host + parts.host
    if min(rooms.hbm) < 0 or min(rooms.host) < 0:
        return None
    if hbm > sum(rooms.hbm) or host > sum(rooms.host):
        return None
    free.sort(key=lambda shard: -max(shard[0].hbm, shard[0].host))
    needs = [need for need, _, _ in free]
    if fast and len(needs) <= FEW_SHARDS:
        found = _fastest(needs, rooms)
    else:
        found = (_search(needs, rooms, by_time=True) if fast else None) or _search(
            needs, rooms, by_time=False
        )
    if found is None:
        return None
    for (_, own, index), rank in zip(free, found, strict=True):
        own[index] = rank
    return ranks


def slowest(proposal: Sequence[Parts], ranks: Sequence[Sequence[int]], world_size: int) -> float:
    """Time of a step on the slowest rank, as TorchRec's ``NoopPerfModel`` adds it up.

    Args:
        proposal: one option for each table.
        ranks: what :func:`pack` returned.
        world_size: number of ranks.
    """
    times = [0.0] * world_size
    for parts, own in zip(proposal, ranks, strict=True):
        for need, rank in zip(parts.needs, own, strict=True):
            times[rank] += need.time
    return max(times)


def _fastest(needs: Sequence[Need], rooms: Rooms) -> list[int] | None:
    """Branch and bound over all assignments."""
    best, ranks = math.inf, None
    taken: list[int] = []

    def go_on() -> None:
        nonlocal best, ranks
        time = max(rooms.time)
        if time >= best:
            return
        if len(taken) == len(needs):
            best, ranks = time, list(taken)
            return
        need = needs[len(taken)]
        for rank in rooms.fitting(need, by_time=True):
            before = rooms.time[rank]
            rooms.take(rank, need)
            taken.append(rank)
            go_on()
            taken.pop()
            rooms.free(rank, need, before)

    go_on()
    return ranks


def _search(needs: Sequence[Need], rooms: Rooms, by_time: bool) -> list[int] | None:
    """Depth-first search in the order of the shards. If it fails, rooms are unchanged."""
    others: list[list[int]] = []  # for each shard that was moved, the ranks still to be tried
    taken: list[int] = []
    times: list[float] = []
    back = False
    attempts = _MOST_ATTEMPTS if len(needs) <= _MANY_SHARDS else _FEWER_ATTEMPTS
    for _ in range(len(needs) + attempts):
        depth = len(taken)
        if depth == len(needs):
            return taken
        need = needs[depth]
        if not back:
            # Further ranks are listed only when the search comes back.
            rank = rooms.first(need, by_time)
            others.append([-1])
        else:
            if others[depth] == [-1]:
                others[depth] = rooms.fitting(need, by_time)[:0:-1]
            rank = others[depth].pop() if others[depth] else None
        if rank is not None:
            times.append(rooms.time[rank])
            rooms.take(rank, need)
            taken.append(rank)
            back = False
            continue
        others.pop()
        if not taken:
            return None
        rooms.free(taken.pop(), needs[depth - 1], times.pop())
        back = True
    while taken:
        rooms.free(taken.pop(), needs[len(taken)], times.pop())
    return None
