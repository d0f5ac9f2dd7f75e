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
from torchrec_hkv.planner.packing import ShardNeeds, free_memory
from torchrec_hkv.planner.report import format_bytes

_MAX_NAMED = 5


@dataclasses.dataclass(frozen=True)
class MissingMemory:
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


def smallest_options(
    options: Sequence[ShardingOption], topology: Topology, fit_ranks: bool = True
) -> list[ShardingOption]:
    """For each table, the option that takes the smallest part of the ranks' memory.

    Args:
        options: options of all tables.
        topology: topology with the memory available for tables.
        fit_ranks: whether to prefer options whose shards each fit a rank.
    """
    hbm = max(sum(device.storage.hbm for device in topology.devices), 1)
    host = max(sum(device.storage.ddr for device in topology.devices), 1)

    max_hbm = max(device.storage.hbm for device in topology.devices)
    max_host = max(device.storage.ddr for device in topology.devices)

    def part(option: ShardingOption) -> tuple[bool, float]:
        is_over = fit_ranks and any(
            shard.storage.hbm > max_hbm or shard.storage.ddr > max_host
            for shard in option.shards
            if shard.storage is not None
        )
        return is_over, option.total_storage.hbm / hbm + option.total_storage.ddr / host

    by_table: dict[tuple[str, str], tuple[tuple[bool, float], ShardingOption]] = {}
    for option in options:
        key, size = (option.path, option.name), part(option)
        if key not in by_table or size < by_table[key][0]:
            by_table[key] = (size, option)
    return [option for _, option in by_table.values()]


def missing_bytes(
    options: Sequence[ShardingOption],
    topology: Topology,
    parts: Callable[[ShardingOption], ShardNeeds] = ShardNeeds,
) -> MissingMemory:
    """Estimates missing memory. Shards are placed largest first, where most memory is left.

    Args:
        options: one option per table.
        topology: topology with the memory available for tables.
        parts: returns the needs of an option.
    """
    needs = [parts(option).native for option in options]
    hbm, host, short = free_memory(topology).missing(needs)
    order = sorted(short, key=lambda at: -(needs[at].hbm + needs[at].host))
    return MissingMemory(hbm, host, tuple(options[at] for at in order))


def too_large(options: Sequence[ShardingOption], topology: Topology) -> str:
    """A sentence that names the tables whose options do not fit even an empty rank; empty if there
    are none.

    Args:
        options: all options of all tables.
        topology: topology with the memory available for tables.
    """
    hbm = max(device.storage.hbm for device in topology.devices)
    host = max(device.storage.ddr for device in topology.devices)
    minimum: dict[tuple[str, str], tuple[int, ShardingOption, Storage]] = {}
    for option in options:
        stored = [shard.storage for shard in option.shards if shard.storage is not None]
        lacks = [max(each.hbm - hbm, 0) + max(each.ddr - host, 0) for each in stored]
        worst = max(range(len(stored)), key=lambda at: lacks[at] or stored[at].hbm)
        key = (option.path, option.name)
        if key not in minimum or lacks[worst] < minimum[key][0]:
            minimum[key] = (lacks[worst], option, stored[worst])
    over = sorted((each for each in minimum.values() if each[0]), key=lambda each: -each[0])
    if not over:
        return ""
    named = ", ".join(
        f"{full_name(option)!r} at least {_memory_text(storage)} ({kernel_of(option)}, "
        f"{option.sharding_type})"
        for _, option, storage in over[:_MAX_NAMED]
    )
    others = f" and {len(over) - _MAX_NAMED} others" if len(over) > _MAX_NAMED else ""
    return f" A rank has {_memory_text(Storage(hbm, host))}, but a shard needs: {named}{others}."


def refusal(missing: MissingMemory, topology: Topology) -> str:
    """The error message: the tables, their minimal memory, and the missing memory."""
    named = [
        f"{full_name(option)!r} (at least {_memory_text(option.total_storage)} on "
        f"{kernel_of(option)}, {option.sharding_type})"
        for option in missing.tables[:_MAX_NAMED]
    ]
    more = len(missing.tables) - _MAX_NAMED
    others = f" and {more} others" if more > 0 else ""
    ranks = len(topology.devices)
    available = _memory_text(
        Storage(
            sum(device.storage.hbm for device in topology.devices),
            sum(device.storage.ddr for device in topology.devices),
        )
    )
    return (
        f"There is insufficient storage for a plan: {ranks} rank{'s' if ranks > 1 else ''} with "
        f"{available} for tables lack {missing} for tables {', '.join(named)}{others}."
    )


def _memory_text(storage: Storage) -> str:
    parts = []
    if storage.hbm > 0:
        parts.append(f"{format_bytes(storage.hbm)} of HBM")
    if storage.ddr > 0 or not parts:
        parts.append(f"{format_bytes(storage.ddr)} of host memory")
    return " and ".join(parts)
