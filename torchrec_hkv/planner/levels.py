"""Groups the options of each table by loss, least first."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_hkv.planner.losses import TableLoss
from torchrec_hkv.planner.options import kernel_of


@dataclasses.dataclass(frozen=True)
class LossLevel:
    """Options of a table with the same loss.

    Attributes:
        loss: loss of each option.
        options: the sharding options.
        hbm: the least HBM that an option takes over all ranks, in bytes.
        host: the least host memory that an option takes over all ranks, in bytes.
        total: the least memory that an option takes over all ranks, in bytes.
        chain: key that is equal for levels that differ only in a size; within a chain, levels with
            more loss take less memory.
        shard: the least bytes of the largest shard of an option.
    """

    loss: TableLoss
    options: tuple[ShardingOption, ...]
    hbm: int
    host: int
    total: int
    chain: tuple[str, ...]
    shard: int = 0


@dataclasses.dataclass(frozen=True)
class TableLevels:
    """The levels of a table.

    Attributes:
        lossless: the level without loss; None if there is none.
        lossy: levels with loss, least first.
    """

    lossless: LossLevel | None
    lossy: tuple[LossLevel, ...]

    @property
    def all(self) -> tuple[LossLevel, ...]:
        """All levels, least loss first."""
        return (*(() if self.lossless is None else (self.lossless,)), *self.lossy)


def levels_of(
    options: Sequence[ShardingOption],
    topology: Topology,
    loss: Callable[[ShardingOption], TableLoss],
    max_loss: Callable[[ShardingOption], float | None],
) -> dict[tuple[str, str], TableLevels]:
    """The levels of each table, by path and name.

    Options that fit no rank, or lose more than their table may, are left out.

    Args:
        options: options of all tables.
        topology: topology with the memory available for tables.
        loss: returns the loss of an option.
        max_loss: returns the bound on the loss of an option's table; None for no bound.
    """
    hbm = max(device.storage.hbm for device in topology.devices)
    host = max(device.storage.ddr for device in topology.devices)
    grouped: dict[tuple[str, str], dict[tuple, list[ShardingOption]]] = {}
    losses: dict[tuple, TableLoss] = {}
    for option in options:
        by_loss = grouped.setdefault((option.path, option.name), defaultdict(list))
        if any(s.storage and (s.storage.hbm > hbm or s.storage.ddr > host) for s in option.shards):
            continue
        lost, bound = loss(option), max_loss(option)
        if bound is not None and lost.value > bound:
            continue
        chain = (kernel_of(option), *(part.kind for part in lost.parts)) if lost.is_lossy else ()
        key = (lost.is_lossy, lost.value, chain)
        losses[key] = lost
        by_loss[key].append(option)
    found = {}
    for table, by_loss in grouped.items():
        levels = [_level(losses[key], key[2], by_loss[key]) for key in sorted(by_loss)]
        lossless = [level for level in levels if not level.loss.is_lossy]
        lossy = tuple(level for level in levels if level.loss.is_lossy)
        found[table] = TableLevels(lossless[0] if lossless else None, lossy)
    return found


def _level(loss: TableLoss, chain: tuple[str, ...], options: Sequence[ShardingOption]) -> LossLevel:
    memory = [_memory(option) for option in options]
    return LossLevel(
        loss,
        tuple(options),
        min(hbm for hbm, _ in memory),
        min(host for _, host in memory),
        min(hbm + host for hbm, host in memory),
        chain,
        min(map(_largest, options)),
    )


def _largest(option: ShardingOption) -> int:
    """Bytes of the largest shard."""
    stored = [shard.storage for shard in option.shards if shard.storage is not None]
    return max((each.hbm + each.ddr for each in stored), default=0)


def _memory(option: ShardingOption) -> tuple[int, int]:
    """HBM and host memory over all ranks, without the objects that ``total_storage`` adds up."""
    stored = [shard.storage for shard in option.shards if shard.storage is not None]
    return sum(each.hbm for each in stored), sum(each.ddr for each in stored)
