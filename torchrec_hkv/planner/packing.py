"""Packs shards into the memory of ranks. It runs in C++, because searches pack often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import PartitionByType, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_hkv import _C
from torchrec_hkv.compat import ranks_of_host

#: Number of bytes that counts as unlimited. Sums of it fit in 64 bits.
_UNLIMITED = 1 << 61

#: Free memory of ranks.
FreeMemory = _C.PlannerFreeMemory

#: The ranks on which the shards of an option may be.
_SPREADS = {
    PartitionByType.DEVICE.value: _C.PlannerSpread.ANY_RANK,
    PartitionByType.UNIFORM.value: _C.PlannerSpread.ALL_RANKS,
    PartitionByType.HOST.value: _C.PlannerSpread.HOST_RANKS,
    PartitionByType.MULTI_HOST.value: _C.PlannerSpread.HOST_RANKS,
}


class ShardNeeds:
    """The needs of an option's shards.

    Attributes:
        native: the needs in the form that C++ takes.
        is_placed: see :func:`is_placed`.
        hbm: bytes of HBM over all shards.
        host: bytes of host memory over all shards.
        time: time of a step over all shards.
    """

    __slots__ = ("hbm", "host", "is_placed", "native", "time")

    def __init__(self, option: ShardingOption) -> None:
        """
        Args:
            option: an option whose shards have their memory filled in.
        """
        of_shards = [
            (
                0 if (stored := shard.storage) is None else min(stored.hbm, _UNLIMITED),
                0 if stored is None else min(stored.ddr, _UNLIMITED),
                0.0 if (perf := shard.perf) is None else perf.total,
            )
            for shard in option.shards
        ]
        self.native = _C.PlannerShardNeeds(of_shards, _spread(option))
        self.is_placed = is_placed(option)
        self.hbm, self.host = self.native.hbm, self.native.host
        self.time = self.native.time

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.native)

    @property
    def size(self) -> tuple[int, int]:
        """Sort key: the bytes of the largest shard, then of all shards."""
        return self.native.max_bytes, self.hbm + self.host


class PlanSums:
    """Sums over the options of plans. Only the options that differ from the previous plan are
    added and subtracted."""

    def __init__(self, needs_of: Callable[[ShardingOption], ShardNeeds]) -> None:
        """
        Args:
            needs_of: returns the needs of an option.
        """
        self._parts = needs_of
        self._plan: list[ShardingOption] = []
        self._sums = (0, 0, 0, 0.0)

    def of(self, plan: Sequence[ShardingOption]) -> tuple[int, int, int, float]:
        """Sums of a plan: bytes of HBM, bytes of host memory, number of shards, and time."""
        before = self._plan
        if len(before) != len(plan):
            before, self._sums = [], (0, 0, 0, 0.0)
        for old, new in itertools.zip_longest(before, plan):
            if old is new:
                continue
            if old is not None:
                self._add(self._parts(old), -1)
            self._add(self._parts(new), 1)
        self._plan = list(plan)
        return self._sums

    def _add(self, parts: ShardNeeds, times: int) -> None:
        hbm, host, shards, time = self._sums
        self._sums = (
            hbm + times * parts.hbm,
            host + times * parts.host,
            shards + times * parts.num_shards,
            time + times * parts.time,
        )


def free_memory(topology: Topology) -> FreeMemory:
    """The memory of a topology."""
    return FreeMemory(
        [min(device.storage.hbm, _UNLIMITED) for device in topology.devices],
        [min(device.storage.ddr, _UNLIMITED) for device in topology.devices],
        ranks_of_host(topology),
    )


def _spread(option: ShardingOption) -> _C.PlannerSpread:
    if option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
        return _C.PlannerSpread.ONE_HOST
    return _SPREADS[option.partition_by]


def is_placed(option: ShardingOption) -> bool:
    """Whether :func:`pack` supports the way in which the option's shards are assigned."""
    return option.partition_by == PartitionByType.UNIFORM.value or option.dependency is None


def is_by_host(option: ShardingOption) -> bool:
    """Whether shards of the option must be on one host."""
    return option.partition_by in (PartitionByType.HOST.value, PartitionByType.MULTI_HOST.value)


def pack(proposal: Sequence[ShardNeeds], memory: FreeMemory) -> list[list[int]] | None:
    """Assigns each shard to a rank with enough memory, so that the slowest rank takes little time.

    Args:
        proposal: one option per table.
        memory: the free memory of the ranks.

    Returns:
        The index of a rank for each shard of each option; None if no assignment was found.
    """
    return memory.pack([parts.native for parts in proposal], True)


def fits(proposal: Sequence[ShardNeeds], memory: FreeMemory) -> bool:
    """Whether an assignment was found, however slow."""
    return memory.fits([parts.native for parts in proposal])


def slowest_rank_time(proposal: Sequence[ShardNeeds], memory: FreeMemory) -> float | None:
    """Time of a step on the slowest rank after :func:`pack`, as TorchRec's ``NoopPerfModel`` adds
    it up; None if no assignment was found."""
    return memory.fastest([parts.native for parts in proposal])
