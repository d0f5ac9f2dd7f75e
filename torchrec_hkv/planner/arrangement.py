"""Finds sharding options for tables with given loss levels: whether they fit, and the fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    PerfModel,
    PlannerError,
    ShardingOption,
    Topology,
)

from torchrec_hkv.planner.levels import Level
from torchrec_hkv.planner.partitioner import is_placed, place

#: Number of combinations of options that are tried.
_MOST_FITS, _MOST_PROPOSALS = 4096, 3000
#: Number of steps between no table and all tables spread over all ranks.
_PATTERNS = 24


@dataclasses.dataclass(frozen=True)
class Arranged:
    """A plan that fits.

    Attributes:
        time: time of a step on the slowest rank, by the performance model.
        loss: estimated loss of all tables.
        options: one option for each table.
    """

    time: float
    loss: float
    options: list[ShardingOption]


class Arranger:
    """Finds a sharding option for each table, given its level of loss."""

    def __init__(
        self,
        topology: Topology,
        partitioner: Partitioner,
        perf_model: PerfModel,
        fill_in_times: Callable[[Sequence[ShardingOption]], None],
        most_loss: float = math.inf,
    ) -> None:
        """
        Args:
            topology: topology with the memory available for tables.
            partitioner: assigns shards to ranks.
            perf_model: rates plans.
            fill_in_times: estimates the times of options that have none yet.
            most_loss: bound on the loss of all tables together.
        """
        self._topology, self._partitioner, self._perf_model = topology, partitioner, perf_model
        self._fill_in_times, self._most_loss = fill_in_times, most_loss
        self._hbm = sum(device.storage.hbm for device in topology.devices)
        self._host = sum(device.storage.ddr for device in topology.devices)
        self._several_hosts = topology.world_size > topology.local_world_size
        self._thinned: dict[int, tuple[Level, list[ShardingOption]]] = {}

    def may_fit(self, levels: Iterable[Level]) -> bool:
        """Whether the minimal memory of the levels fits in the memory of all ranks together."""
        hbm = host = 0
        for level in levels:
            hbm, host = hbm + level.hbm, host + level.host
        return hbm <= self._hbm and host <= self._host

    def fitting(self, levels: Sequence[Level]) -> list[ShardingOption] | None:
        """Options that fit, not necessarily fast ones; None if none were found."""
        if not self.may_fit(levels):
            return None
        for proposal in self._combinations([self._thin(level) for level in levels]):
            if all(is_placed(option) for option in proposal):
                has_place = place(proposal, self._topology)
                _forget_ranks(proposal)
                if not has_place:
                    continue
            self._fill_in_times(proposal)
            if self.rating(proposal) is not None:
                return list(proposal)
        return None

    def rating(self, proposal: Sequence[ShardingOption]) -> float | None:
        """Time of a step on the slowest rank; None if the options do not fit."""
        try:
            return self._perf_model.rate(
                self._partitioner.partition(
                    proposal=list(proposal), storage_constraint=self._topology
                )
            )
        except PlannerError:
            return None
        finally:
            _forget_ranks(proposal)

    def fastest(
        self, tables: Sequence[Sequence[Level]], known: Sequence[Sequence[ShardingOption]] = ()
    ) -> Arranged | None:
        """The fastest plan found; of equally fast ones, the one with the least loss.

        Args:
            tables: the allowed levels of each table.
            known: plans that are known to fit.
        """
        by_table = {
            (o.path, o.name): [o for level in levels for o in level.options]
            for levels in tables
            for o in levels[0].options[:1]
        }
        losses = {
            id(o): level.loss.value for levels in tables for level in levels for o in level.options
        }
        all_tried = math.prod(map(len, by_table.values())) <= _MOST_PROPOSALS
        if not all_tried:
            by_table = {table: self._quick_to_place(options) for table, options in by_table.items()}
        space = [option for options in by_table.values() for option in options]
        self._fill_in_times(space)
        best: Arranged | None = None
        proposals = self._proposals(space) if len(space) <= _MOST_PROPOSALS else ()
        for proposal in itertools.chain(known, proposals):
            best = self._better(best, proposal, losses)
        if best is None or all_tried:
            return best
        return self._improved(best, by_table, losses)

    def _quick_to_place(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """The options without those that take longer to place but, on one host, spread shards like
        other options."""
        kept = [option for option in options if self._several_hosts or is_placed(option)]
        return kept or options

    def _better(
        self,
        best: Arranged | None,
        proposal: Sequence[ShardingOption],
        losses: Mapping[int, float],
    ) -> Arranged | None:
        loss = sum(losses[id(option)] for option in proposal)
        if loss > self._most_loss:
            return best
        rating = self.rating(proposal)
        if rating is None or (best is not None and (best.time, best.loss) <= (rating, loss)):
            return best
        return Arranged(rating, loss, list(proposal))

    def _proposals(self, space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        proposers = (
            GridSearchProposer(_MOST_PROPOSALS),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        )
        for proposer in proposers:
            proposer.load(search_space=space)
            while (proposal := proposer.propose()) is not None:
                yield proposal
                proposer.feedback(partitionable=True)

    def _improved(
        self,
        best: Arranged,
        by_table: Mapping[tuple[str, str], Sequence[ShardingOption]],
        losses: Mapping[int, float],
    ) -> Arranged:
        """Changes the option of one table at a time while the plan improves."""
        before: Arranged | None = None
        while best is not before:
            before = best
            for index, own in enumerate(before.options):
                for option in by_table[own.path, own.name]:
                    plan = best.options
                    changed = [*plan[:index], option, *plan[index + 1 :]]
                    best = self._better(best, changed, losses) or best
        return best

    def _thin(self, level: Level) -> list[ShardingOption]:
        """Options of a level, without those that need more memory than another on every rank."""
        cached = self._thinned.get(id(level))
        if cached is not None:
            return cached[1]
        kept: list[ShardingOption] = []
        for option in sorted(level.options, key=lambda option: _size(_bytes(option), True)):
            if not is_placed(option) and not self._several_hosts:
                continue  # on one host other types spread shards alike
            if not any(_spares(other, option) for other in kept):
                kept.append(option)
        kept = kept or list(level.options)
        self._thinned[id(level)] = (level, kept)
        return kept

    def _combinations(
        self, tables: list[list[ShardingOption]]
    ) -> Iterator[tuple[ShardingOption, ...]]:
        """All combinations, or a few promising ones if there are too many."""
        if math.prod(map(len, tables)) <= _MOST_FITS:
            yield from itertools.product(*tables)
            return
        # Spread large tables over ranks and place small ones on single ranks; once with minimal HBM
        # and once with minimal memory in total.
        order = sorted(range(len(tables)), key=lambda index: -min(map(_total, tables[index])))
        memories = (_bytes, _hbm_bytes) if self._host else (_bytes,)
        for memory, part in itertools.product(memories, range(_PATTERNS + 1)):
            spread = set(order[: len(order) * part // _PATTERNS])
            yield tuple(
                min(options, key=lambda o: _size(memory(o), first_largest=index in spread))
                for index, options in enumerate(tables)
            )


def _forget_ranks(proposal: Iterable[ShardingOption]) -> None:
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def _parts(option: ShardingOption) -> list[tuple[int, int]]:
    return [(s.storage.hbm, s.storage.ddr) for s in option.shards if s.storage is not None]


def _bytes(option: ShardingOption) -> list[int]:
    return [hbm + host for hbm, host in _parts(option)]


def _hbm_bytes(option: ShardingOption) -> list[int]:
    return [hbm for hbm, _ in _parts(option)]


def _size(parts: Sequence[int], first_largest: bool) -> tuple[int, int]:
    """Sort key: the bytes of the largest shard and of all shards."""
    largest, total = max(parts, default=0), sum(parts)
    return (largest, total) if first_largest else (total, largest)


def _total(option: ShardingOption) -> int:
    return sum(_bytes(option))


def _spares(other: ShardingOption, option: ShardingOption) -> bool:
    """Whether ``other`` fits wherever ``option`` fits."""
    if other.partition_by != option.partition_by or len(other.shards) != len(option.shards):
        return False
    if other.partition_by not in (PartitionByType.UNIFORM.value, PartitionByType.DEVICE.value):
        return False
    pairs = zip(_parts(other), _parts(option), strict=True)
    return all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairs)
