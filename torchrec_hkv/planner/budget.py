"""The memory that is missing if no plan fits, or if a plan with another kernel does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import (
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_hkv.planner.options import full_name, kernel_of
from torchrec_hkv.planner.packing import Parts, rooms_of
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


def missing_bytes(
    options: Sequence[ShardingOption],
    topology: Topology,
    parts: Callable[[ShardingOption], Parts] = Parts,
) -> Missing:
    """Estimates missing memory: each shard, largest first, is placed where most memory is left.

    Args:
        options: one option for each table.
        topology: topology with the memory available for tables.
        parts: returns the needs of an option.
    """
    needs = [parts(option).needs for option in options]
    hbm, host, short = rooms_of(topology).missing(needs)
    order = sorted(short, key=lambda at: -(needs[at].hbm + needs[at].host))
    return Missing(hbm, host, tuple(options[at] for at in order))


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
