"""Finds sharding options for tables with given loss levels: options that fit, or the fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import (
    Partitioner,
    PerfModel,
    PlannerError,
    ShardingOption,
    Topology,
)

from torchrec_hkv.planner.levels import LossLevel
from torchrec_hkv.planner.missing_memory import MissingMemory, missing_bytes
from torchrec_hkv.planner.option_sets import OptionSet, SizedOption, fits_wherever
from torchrec_hkv.planner.options import is_backend_option
from torchrec_hkv.planner.packing import (
    PlanSums,
    ShardNeeds,
    fits,
    free_memory,
    is_by_host,
    slowest_rank_time,
)
from torchrec_hkv.planner.partitioner import SearchingPartitioner
from torchrec_hkv.planner.proposer import GreedyProposer
from torchrec_hkv.progress import advance

#: Up to this number of tables, plans are searched exhaustively where that is possible.
FEW_TABLES = 12
#: Bounds on the combinations of options that are tried for few and for many tables, and on the
#: proposals.
_MAX_FITS, _FEWER_FITS, _MAX_PROPOSALS = 4096, 256, 3000
#: Number of options of all tables up to which greedy proposals are tried.
_MAX_OPTIONS = 20_000
#: Relative error of a sum of times.
_ROUNDING = 1e-9
#: Number of shards that are placed while one plan is improved.
_MAX_PLACED = 500_000


@dataclasses.dataclass(frozen=True)
class FittingPlan:
    """A plan that fits.

    Attributes:
        time: time of a step on the slowest rank, by the performance model.
        loss: estimated loss of all tables.
        options: one option per table.
    """

    time: float
    loss: float
    options: list[ShardingOption]


class OptionSelector:
    """Finds a sharding option per table, given its level of loss."""

    def __init__(
        self,
        topology: Topology,
        partitioner: Partitioner,
        perf_model: PerfModel,
        fill_in_times: Callable[[Sequence[ShardingOption]], None],
        max_loss: float = math.inf,
    ) -> None:
        """
        Args:
            topology: topology with the memory available for tables.
            partitioner: assigns shards to ranks.
            perf_model: rates plans.
            fill_in_times: estimates the times of options that have none yet.
            max_loss: bound on the loss of all tables together.
        """
        self._topology, self._partitioner, self._perf_model = topology, partitioner, perf_model
        self._fill_in_times, self._max_loss = fill_in_times, max_loss
        self._ranks, self._memory = len(topology.devices), free_memory(topology)
        self._hbm = sum(device.storage.hbm for device in topology.devices)
        self._host = sum(device.storage.ddr for device in topology.devices)
        self._several_hosts = topology.world_size > topology.local_world_size
        # Whether this class can rate plans itself, without TorchRec's objects.
        self._rates_plans = (
            type(partitioner) is SearchingPartitioner and type(perf_model) is NoopPerfModel
        )
        # Caches by id() of an option or level. They hold the object, so that its id is not reused.
        self._timed: dict[int, tuple[ShardingOption, ShardNeeds]] = {}
        self._option_sets: dict[int, tuple[LossLevel, OptionSet]] = {}
        self._sums = PlanSums(self._needs)
        self._min_times: dict[int, tuple[LossLevel, float]] = {}

    @property
    def hbm(self) -> int:
        """HBM of all ranks together."""
        return self._hbm

    @property
    def host(self) -> int:
        """Host memory of all ranks together."""
        return self._host

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._ranks

    @property
    def adds_times(self) -> bool:
        """Whether the time of a plan is the largest sum of shard times on a rank."""
        return self._rates_plans

    def has_memory(self, hbm: int, host: int, total: int) -> bool:
        """Whether all ranks together have this much memory."""
        return hbm <= self._hbm and host <= self._host and total <= self._hbm + self._host

    def min_time(self, level: LossLevel) -> float:
        """The least time of an option of a level, summed over all ranks."""
        found = self._min_times.get(id(level))
        if found is None:
            self._fill_in_times(level.options)
            minimum = min(self._needs(option).time for option in level.options)
            found = self._min_times[id(level)] = (level, minimum)
        return found[1]

    def may_be_within_time(self, levels: Iterable[LossLevel], time: float) -> bool:
        """Whether a plan of these levels might take no more than a time."""
        return self._may_fit(0, 0, sum(map(self.min_time, levels)), time)

    def find_fitting(self, levels: Sequence[LossLevel]) -> list[ShardingOption] | None:
        """Options that fit, not necessarily fast ones; None if none were found."""
        advance(1)
        tables = [self._options_of_level(level) for level in levels]
        maximum = _MAX_FITS if len(tables) <= FEW_TABLES else _FEWER_FITS
        are_few = math.prod(len(table.options) for table in tables) <= maximum
        if self._rates_plans and not are_few and all(table.are_placed for table in tables):
            chosen = self._memory.fitting([table.needs for table in tables])
            if chosen is None:
                return None
            return [t.options[at].option for t, at in zip(tables, chosen, strict=True)]
        for sized in self._combinations(tables, are_few):
            if sum(one.needs.hbm for one in sized) > self._hbm:
                continue
            if sum(one.needs.host for one in sized) > self._host:
                continue
            options = [one.option for one in sized]
            are_placed = all(one.needs.is_placed for one in sized)
            if are_placed and not fits([one.needs for one in sized], self._memory):
                continue
            if are_placed and self._rates_plans:
                return options
            self._fill_in_times(options)
            if self.rating(options) is not None:
                return options
        return None

    def rating(self, proposal: Sequence[ShardingOption]) -> float | None:
        """Time of a step on the slowest rank; None if the options do not fit."""
        advance(1)
        parts = [self._needs(option) for option in proposal] if self._rates_plans else []
        if self._rates_plans and all(each.is_placed for each in parts):
            return slowest_rank_time(parts, self._memory)
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

    def missing_memory(self, proposal: Sequence[ShardingOption]) -> MissingMemory:
        """The memory that a plan lacks."""
        return missing_bytes(proposal, self._topology, self._needs)

    def _needs(self, option: ShardingOption) -> ShardNeeds:
        """The needs of an option whose times are filled in."""
        found = self._timed.get(id(option))
        if found is None:
            found = self._timed[id(option)] = (option, ShardNeeds(option))
        return found[1]

    def can_improve(self, proposal: Sequence[ShardingOption], time: float) -> bool:
        """Whether a plan could fit and take no more than ``time`` if the ranks shared the load
        evenly."""
        if not self._rates_plans:
            return True
        hbm, host, _, total_time = self._sums.of(proposal)
        return self._may_fit(hbm, host, total_time, time)

    def _may_fit(self, hbm: int, host: int, total_time: float, time: float) -> bool:
        if not self._rates_plans:
            return True
        if hbm > self._hbm or host > self._host:
            return False
        return total_time <= time * self._ranks * (1 + _ROUNDING)

    def find_fastest(
        self,
        tables: Sequence[Sequence[LossLevel]],
        known_fitting: Sequence[Sequence[ShardingOption]] = (),
    ) -> FittingPlan | None:
        """The fastest plan found; of equally fast ones, the one with the least loss.

        Args:
            tables: the allowed levels of each table.
            known_fitting: plans that are known to fit.
        """
        by_table = {
            (o.path, o.name): [o for level in levels for o in level.options]
            for levels in tables
            for o in levels[0].options[:1]
        }
        losses = {
            id(o): level.loss.value for levels in tables for level in levels for o in level.options
        }
        all_tried = math.prod(map(len, by_table.values())) <= _MAX_PROPOSALS
        if not all_tried:
            by_table = {
                table: self._without_by_host(options) for table, options in by_table.items()
            }
        space = [option for options in by_table.values() for option in options]
        self._fill_in_times([*space, *itertools.chain(*known_fitting)])
        best: FittingPlan | None = None
        for proposal in itertools.chain(known_fitting, self._all_proposals(by_table)):
            if best is None or self.can_improve(proposal, best.time):
                best = self._better(best, proposal, losses)
        if best is None or all_tried:
            return best
        return self._improved(best, by_table, losses)

    def _without_by_host(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """If there is one host, leaves out options by host: other options spread shards alike."""
        others = [option for option in options if self._several_hosts or not is_by_host(option)]
        return others or options

    def _better(
        self,
        best: FittingPlan | None,
        proposal: Sequence[ShardingOption],
        losses: Mapping[int, float],
    ) -> FittingPlan | None:
        loss = sum(losses[id(option)] for option in proposal)
        if loss > self._max_loss:
            return best
        rating = self.rating(proposal)
        if rating is None or (best is not None and (best.time, best.loss) <= (rating, loss)):
            return best
        return FittingPlan(rating, loss, list(proposal))

    def _all_proposals(
        self, by_table: Mapping[tuple[str, str], Sequence[ShardingOption]]
    ) -> Iterator[list[ShardingOption]]:
        """Proposals with all options, then with stock kernels only: with more options, a greedy
        search may end at a slower plan."""
        space = [option for options in by_table.values() for option in options]
        if len(space) > _MAX_OPTIONS:
            return
        yield from self._proposals(space)
        stock = [option for option in space if not is_backend_option(option)]
        if len(stock) < len(space) and len({(o.path, o.name) for o in stock}) == len(by_table):
            yield from self._proposals(stock)

    def _proposals(self, space: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        proposers = (
            GridSearchProposer(_MAX_PROPOSALS),
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
        best: FittingPlan,
        by_table: Mapping[tuple[str, str], Sequence[ShardingOption]],
        losses: Mapping[int, float],
    ) -> FittingPlan:
        """Changes the option of one table at a time while the plan improves."""
        before: FittingPlan | None = None
        placements_left = _MAX_PLACED
        while best is not before and placements_left > 0:
            before = best
            for index, old_option in enumerate(before.options):
                plan, current = best.options, self._needs(old_option)
                hbm, host, shards, total_time = self._sums.of(plan)
                hbm, host, total_time = (
                    hbm - current.hbm,
                    host - current.host,
                    total_time - current.time,
                )
                for option in by_table[old_option.path, old_option.name]:
                    parts = self._needs(option)
                    if placements_left <= 0 or not self._may_fit(
                        hbm + parts.hbm, host + parts.host, total_time + parts.time, best.time
                    ):
                        continue
                    placements_left -= shards
                    changed = [*plan[:index], option, *plan[index + 1 :]]
                    best = self._better(best, changed, losses) or best
        return best

    def _options_of_level(self, level: LossLevel) -> OptionSet:
        """Options of a level. If an option needs more memory than another on every rank, it is left
        out."""
        cached = self._option_sets.get(id(level))
        if cached is not None:
            return cached[1]
        selected: list[SizedOption] = []
        all_options = [SizedOption(option, ShardNeeds(option)) for option in level.options]
        for sized in sorted(all_options, key=lambda sized: sized.needs.size):
            if is_by_host(sized.option) and not self._several_hosts:
                continue  # on one host, other sharding types spread shards alike
            if not any(fits_wherever(other, sized) for other in selected):
                selected.append(sized)
        found = OptionSet.of(selected or all_options)
        self._option_sets[id(level)] = (level, found)
        return found

    def _combinations(
        self, tables: Sequence[OptionSet], are_few: bool
    ) -> Iterator[Sequence[SizedOption]]:
        """All combinations, or a few promising ones if there are too many."""
        if are_few:
            yield from itertools.product(*(table.options for table in tables))
            return
        for chosen in self._memory.patterns([table.needs for table in tables]):
            yield [table.options[at] for table, at in zip(tables, chosen, strict=True)]


def _forget_ranks(proposal: Iterable[ShardingOption]) -> None:
    for option in proposal:
        for shard in option.shards:
            shard.rank = None
