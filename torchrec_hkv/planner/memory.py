"""Memory of each rank under a plan: used, available to the planner, and free."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ModuleShardingPlan, ShardingPlan

from torchrec_hkv.planner.report import ReportedModulePlan, columns, format_bytes

# Up to this many different ranks are listed one by one.
_MAX_LISTED = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one kind on one rank, in bytes.

    Attributes:
        tables: rows, optimizer states and indices.
        used: tables, communication buffers and temporary memory of a step.
        budget: the rank's memory without what the planner reserves for the dense model, inputs and
            a margin.
    """

    tables: int = 0
    used: int = 0
    budget: int = 0

    @property
    def free(self) -> int:
        """The unused part of the budget."""
        return self.budget - self.used

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.tables + other.tables, self.used + other.used, self.budget + other.budget
        )


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        hbm: memory of its GPU.
        host: its share of the host's memory.
    """

    hbm: Memory
    host: Memory


class ReportedPlan(ShardingPlan):
    """TorchRec's plan of a model, which also prints the memory of the ranks.

    Attributes:
        memory: memory of each rank; empty if the budget is unknown.
    """

    def __init__(
        self, plan: Mapping[str, ModuleShardingPlan], memory: Sequence[RankMemory] = ()
    ) -> None:
        """
        Args:
            plan: plans by module path.
            memory: memory of each rank.
        """
        super().__init__(dict(plan))
        self.memory = tuple(memory)

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{described}" if (described := describe_memory(self.memory)) else text


def rank_memory(
    plans: Iterable[ReportedModulePlan], options: Iterable[ShardingOption], topology: Topology
) -> list[RankMemory]:
    """The memory of each rank.

    Args:
        plans: plans of the modules.
        options: options of all tables, with the ranks of their shards.
        topology: topology with the memory available for tables.
    """
    tables: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    used: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for plan in plans:
        for report in plan.reports.values():
            for rank, part in zip(report.ranks, report.bytes, strict=True):
                tables[rank][0] += part.hbm
                tables[rank][1] += part.host
    for option in options:
        for shard in option.shards:
            if shard.rank is not None and shard.storage is not None:
                used[shard.rank][0] += shard.storage.hbm
                used[shard.rank][1] += shard.storage.ddr
    return [
        RankMemory(
            hbm=Memory(tables[device.rank][0], used[device.rank][0], device.storage.hbm),
            host=Memory(tables[device.rank][1], used[device.rank][1], device.storage.ddr),
        )
        for device in topology.devices
    ]


def describe_memory(memory: Sequence[RankMemory]) -> str:
    """A printable table of used, available and free memory; equal ranks are merged.

    Args:
        memory: memory of each rank.

    Returns:
        Lines for HBM and for host memory, if there is a budget; ``""`` without any.
    """
    lines = []
    for name, parts in (
        ("HBM", [rank.hbm for rank in memory]),
        ("host", [rank.host for rank in memory]),
    ):
        if all(part.budget <= 0 and part.used == 0 for part in parts):
            continue
        lines += [(name, ranks, *cells) for ranks, cells in _grouped(parts)]
        if len(parts) > 1:
            lines.append((name, "total", *_cells(sum(parts, Memory()))))
    if not lines:
        return ""
    header = ("memory", "ranks", "tables", "used", "budget", "free")
    return (
        f"{columns([header, *lines])}\n"
        "used: tables and buffers of a step; budget: memory without the planner's reserve\n"
    )


def _grouped(parts: Sequence[Memory]) -> list[tuple[str, tuple[str, ...]]]:
    """Ranks and their cells; if many differ, only the fullest and the emptiest rank."""
    by_cells: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, part in enumerate(parts):
        by_cells[_cells(part)].append(rank)
    if len(by_cells) <= _MAX_LISTED:
        return [(_ranges(ranks), cells) for cells, ranks in by_cells.items()]
    by_room = sorted(range(len(parts)), key=lambda rank: parts[rank].free)
    return [
        (f"{rank} ({which})", _cells(parts[rank]))
        for rank, which in ((by_room[0], "fullest"), (by_room[-1], "emptiest"))
    ]


def _cells(part: Memory) -> tuple[str, ...]:
    free = format_bytes(part.free) if part.free >= 0 else f"-{format_bytes(-part.free)}"
    return (
        format_bytes(part.tables),
        format_bytes(part.used),
        format_bytes(max(part.budget, 0)),
        free,
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Formats ranks such as 0, 1, 2, 3 and 5 as ``0-3, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
