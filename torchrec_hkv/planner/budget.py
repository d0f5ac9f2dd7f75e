"""The memory that is missing if no plan fits, or if a plan with another kernel does not fit."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner.types import (
    PartitionByType,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_hkv.planner.options import full_name, kernel_of
from torchrec_hkv.planner.report import format_bytes

_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Missing:
    """Missing memory, summed over ranks, and the tables on ranks with too little memory.

    Attributes:
        hbm: missing bytes of HBM.
        host: missing bytes of host memory.
        tables: options of the tables on these ranks, largest first.
    """

    hbm: int
    host: int
    tables: tuple[ShardingOption, ...]

    def __bool__(self) -> bool:
        return self.hbm > 0 or self.host > 0

    def __str__(self) -> str:
        parts = [
            f"{format_bytes(count)} of {memory} ({count:,} bytes)"
            for count, memory in ((self.hbm, "HBM"), (self.host, "host memory"))
            if count > 0
        ]
        return " and ".join(parts)


def smallest(options: Sequence[ShardingOption], topology: Topology) -> list[ShardingOption]:
    """For each table, the option that takes the smallest part of the ranks' memory."""
    hbm = max(sum(device.storage.hbm for device in topology.devices), 1)
    host = max(sum(device.storage.ddr for device in topology.devices), 1)

    def part(option: ShardingOption) -> float:
        return option.total_storage.hbm / hbm + option.total_storage.ddr / host

    by_table: dict[tuple[str, str], ShardingOption] = {}
    for option in options:
        key = (option.path, option.name)
        if key not in by_table or part(option) < part(by_table[key]):
            by_table[key] = option
    return list(by_table.values())


def missing_bytes(options: Sequence[ShardingOption], topology: Topology) -> Missing:
    """Estimates missing memory: each shard, largest first, is placed where most memory is left.

    Args:
        options: one option for each table.
        topology: topology with the memory available for tables.
    """
    left = np.array([[device.storage.hbm, device.storage.ddr] for device in topology.devices])
    held: dict[int, list[ShardingOption]] = defaultdict(list)
    free: list[tuple[tuple[int, int], ShardingOption]] = []
    for option in options:
        is_uniform = option.partition_by == PartitionByType.UNIFORM.value
        for rank, shard in enumerate(option.shards):
            needed = (0, 0) if (stored := shard.storage) is None else (stored.hbm, stored.ddr)
            if is_uniform:
                left[rank] -= needed
                held[rank].append(option)
            else:
                free.append((needed, option))
    for needed, option in sorted(free, key=lambda pair: -max(pair[0])):
        rank = int(left[:, 0 if needed[0] > 0 else 1].argmax())
        left[rank] -= needed
        held[rank].append(option)
    short = [rank for rank, room in enumerate(left) if min(room) < 0]
    tables = {(option.path, option.name): option for rank in short for option in held[rank]}
    return Missing(
        hbm=sum(max(-int(left[rank, 0]), 0) for rank in short),
        host=sum(max(-int(left[rank, 1]), 0) for rank in short),
        tables=tuple(
            sorted(
                tables.values(),
                key=lambda option: -(option.total_storage.hbm + option.total_storage.ddr),
            )
        ),
    )


def refusal(missing: Missing, topology: Topology) -> str:
    """The error message: the tables, their minimal memory, and the missing memory."""
    named = [
        f"{full_name(option)!r} (at least {_taken(option.total_storage)} on {kernel_of(option)}, "
        f"{option.sharding_type})"
        for option in missing.tables[:_MOST_NAMED]
    ]
    more = len(missing.tables) - _MOST_NAMED
    others = f" and {more} others" if more > 0 else ""
    ranks = len(topology.devices)
    room = _taken(
        Storage(
            sum(device.storage.hbm for device in topology.devices),
            sum(device.storage.ddr for device in topology.devices),
        )
    )
    return (
        f"There is insufficient storage for a plan: {ranks} rank{'s' if ranks > 1 else ''} with "
        f"{room} for tables lack {missing} for tables {', '.join(named)}{others}."
    )


def _taken(storage: Storage) -> str:
    parts = []
    if storage.hbm > 0:
        parts.append(f"{format_bytes(storage.hbm)} of HBM")
    if storage.ddr > 0 or not parts:
        parts.append(f"{format_bytes(storage.ddr)} of host memory")
    return " and ".join(parts)
