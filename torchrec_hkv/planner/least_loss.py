"""Finds plans that lose as little quality as the memory, or the user's bounds, require."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from torchrec.distributed.planner.types import (
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.planner.enumerator import BackendEnumerator
from torchrec_hkv.planner.levels import TableLevels, levels_of
from torchrec_hkv.planner.loss_bounds import Table
from torchrec_hkv.planner.missing_memory import MissingMemory
from torchrec_hkv.planner.option_selection import FittingPlan, OptionSelector
from torchrec_hkv.planner.options import full_name, is_backend_option, kernel_of
from torchrec_hkv.planner.packing import ShardNeeds
from torchrec_hkv.planner.search import FEW_TABLES, LeastLossSearch
from torchrec_hkv.planner.thinning import EVERY_VARIANT, Thinning

#: Number of the largest tables whose sizes are listed first.
_FIRST_LISTED = 64
#: Number of refinements, each of which tries the sizes next to the chosen ones.
_MAX_REFINED = 3


class LeastLoss:
    """The search for plans with the least loss."""

    def __init__(
        self,
        enumerator: Callable[[], BackendEnumerator],
        available_topology: Callable[[], Topology],
        partitioner: Partitioner,
        perf_model: PerfModel,
        max_loss: float | None,
        max_time: float | None,
    ) -> None:
        """
        Args:
            enumerator: returns the planner's enumerator.
            available_topology: returns the topology with the memory available for tables.
            partitioner: the planner's partitioner.
            perf_model: the planner's performance model.
            max_loss: loss of all tables together that may be traded for time. None: as little
                loss as possible, but as much as the memory requires.
            max_time: bound on the time of a step on the slowest rank, in milliseconds; None for no
                bound.
        """
        self._enumerator, self._available_topology = enumerator, available_topology
        self._partitioner, self._perf_model = partitioner, perf_model
        self._max_loss, self._max_time = max_loss, max_time
        self._rater: OptionSelector | None = None
        #: If there are many tables: those that the last search let lose quality.
        self._may_lose: set[Table] | None = None

    @property
    def is_traded(self) -> bool:
        """Whether quality may be traded for time."""
        return self._max_loss is not None and self._max_time is None

    def without_loss(self, space: list[ShardingOption]) -> list[ShardingOption]:
        """The options without loss for each table. A table whose options all have the same loss
        keeps them. Empty if a table has only options with different losses, or if those losses add
        up to more than the bound.

        Args:
            space: the enumerated options.
        """
        # A new plan begins.
        self._rater = self._may_lose = None
        loss = self._enumerator().loss
        by_table: dict[tuple[str, str], list[ShardingOption]] = defaultdict(list)
        for option in space:
            by_table[option.path, option.name].append(option)
        selected: list[ShardingOption] = []
        settled = 0.0
        for options in by_table.values():
            lossless = [option for option in options if not loss(option).is_lossy]
            if not lossless and not self._is_settled(options):
                return []
            settled += 0.0 if lossless else loss(options[0]).value
            selected += lossless or options
        return (
            selected if settled <= (math.inf if self._max_loss is None else self._max_loss) else []
        )

    def lossless_plan(self, lossless: list[ShardingOption]) -> list[list[ShardingOption]] | None:
        """A list with the fastest plan of the options; empty if none fits, None if only TorchRec
        can rate plans.

        Args:
            lossless: the options that :meth:`without_loss` returned.
        """
        option_selector, enumerator = self._for_ratings(), self._enumerator()
        if not option_selector.adds_times:
            return None
        tables = levels_of(
            lossless, self._available_topology(), enumerator.loss, enumerator.max_loss
        ).values()
        if not tables or any(not table.all for table in tables):
            return []
        levels = [table.all[0] for table in tables]
        fitting = option_selector.find_fitting(levels)
        found = option_selector.find_fastest(
            [[level] for level in levels], [] if fitting is None else [fitting]
        )
        return [] if found is None else [found.options]

    def rating(self, proposal: list[ShardingOption]) -> float | None:
        """Rating of a plan; None if it does not fit."""
        return self._for_ratings().rating(proposal)

    def missing_memory(self, proposal: list[ShardingOption]) -> MissingMemory:
        """The memory that a plan lacks."""
        return self._for_ratings().missing_memory(proposal)

    def _for_ratings(self) -> OptionSelector:
        if self._rater is None:
            self._rater = self._option_selector(self._available_topology())
        return self._rater

    def _is_settled(self, options: Sequence[ShardingOption]) -> bool:
        enumerator = self._enumerator()
        bound, values = enumerator.max_loss(options[0]), {enumerator.loss(o) for o in options}
        may_lose = max(value.value for value in values) <= (math.inf if bound is None else bound)
        return (
            len(values) == 1
            and may_lose
            and not any(is_backend_option(o) and o.is_open for o in options)
        )

    def smallest_options(self, space: list[ShardingOption]) -> list[ShardingOption]:
        """The enumerated options and some or all of their variants, including the smallest.

        Args:
            space: the enumerated options.
        """
        return self._all_options(space, Thinning() if _are_many(space) else EVERY_VARIANT)

    def _all_options(self, space: list[ShardingOption], thinning: Thinning) -> list[ShardingOption]:
        """The enumerated options and their variants, without those that variants replace.

        Args:
            space: the enumerated options.
            thinning: selects variants.
        """
        variants = self._enumerator().variants(space, thinning)
        replaced = {(o.path, o.name, o.backend) for o in variants if is_backend_option(o)}
        enumerated = [
            option
            for option in space
            if not is_backend_option(option)
            or not option.is_open
            or not registry.get(option.backend).leaves_sizes_open(option.backend_options)
            or (option.path, option.name, option.backend) not in replaced
        ]
        return [*enumerated, *variants]

    def proposals(
        self, space: list[ShardingOption], best: float | None
    ) -> list[list[ShardingOption]]:
        """Plans with loss to propose in addition to those without.

        Args:
            space: the enumerated options.
            best: the best rating without loss; None if no such plan fits.
        """
        if self.is_traded and self._max_loss:
            found = self._fastest(space)
        elif best is not None and (self._max_time is None or best <= self._max_time):
            return []
        else:
            found = self.find_least_loss(space)
        return [] if found is None else [found.options]

    def find_least_loss(
        self,
        space: list[ShardingOption],
        more: int = 0,
        any_loss: bool = False,
        any_time: bool = False,
        near: Sequence[ShardingOption] | None = None,
    ) -> FittingPlan | None:
        """The plan with the least loss.

        Args:
            space: the enumerated options.
            more: additional bytes of memory, over all ranks.
            any_loss: whether to ignore bounds on losses.
            any_time: whether to ignore the bound on time.
            near: the plan that was found for less memory. If there are many tables, only the tables
                that might lose in that search are tried, with sizes near those in the plan.
        """
        topology = _with_more(self._available_topology(), more)
        max_loss = math.inf if self._max_loss is None or any_loss else self._max_loss
        max_time = math.inf if self._max_time is None or any_time else self._max_time
        option_selector = self._option_selector(topology)

        def search(thinning: Thinning) -> LeastLossSearch:
            levels = self._levels(space, topology, any_loss, thinning)
            return LeastLossSearch(levels, option_selector, max_loss, max_time)

        if not _are_many(space):
            return search(EVERY_VARIANT).least_loss()
        bounded = () if any_loss else self._bounded(space)
        if near is not None:
            around = Thinning.coarse(self._may_lose, bounded).refined(_chosen(near))
            return search(around).least_loss()
        self._may_lose = self._candidates(space, search, bounded)
        for tables in (self._may_lose, None):
            # First tries few sizes of each table, then also the sizes next to the chosen ones.
            thinning = Thinning.coarse(tables, bounded)
            found, before = search(thinning).least_loss(), None
            for _ in range(_MAX_REFINED):
                if found is None or found is before:
                    break
                thinning = thinning.refined(_chosen(found.options))
                before, found = found, self._better(found, search(thinning).least_loss())
            if found is not None:
                return found
        return None

    def _candidates(
        self,
        space: Sequence[ShardingOption],
        search: Callable[[Thinning], LeastLossSearch],
        bounded: Collection[Table],
    ) -> set[Table]:
        """Tables that may lose something. To save time, sizes are listed for the largest tables
        only, unless smaller tables might be among the result."""
        loss = self._enumerator().loss
        sizes: dict[Table, float] = {}
        for option in space:
            table, needs = (option.path, option.name), ShardNeeds(option)
            size = math.inf if loss(option).is_lossy else needs.hbm + needs.host
            sizes[table] = min(size, sizes.get(table, math.inf))
        order = sorted(sizes, key=lambda table: -sizes[table])
        count = _FIRST_LISTED
        while True:
            unlisted = sizes[order[count]] if count < len(order) else 0.0
            some = search(Thinning(set(order[:count]), bounded=bounded))
            found = some.tables_that_may_lose(unlisted)
            if found is not None:
                return found
            count *= 2

    def _better(self, one: FittingPlan, other: FittingPlan | None) -> FittingPlan:
        """The plan that comes first in the order of :class:`LeastLossSearch`."""
        if other is None:
            return one
        loss = self._enumerator().loss

        def key(plan: FittingPlan) -> tuple[int, float, float]:
            return sum(loss(option).is_lossy for option in plan.options), plan.loss, plan.time

        return min(one, other, key=key)

    def _bounded(self, space: Sequence[ShardingOption]) -> set[Table]:
        """Tables whose losses are bounded."""
        bound = self._enumerator().max_loss
        return {(option.path, option.name) for option in space if bound(option) is not None}

    def with_more(
        self, space: list[ShardingOption], more: int, plan: Sequence[ShardingOption]
    ) -> FittingPlan | None:
        """Plans again, as if there were more memory.

        Args:
            space: the enumerated options.
            more: additional bytes of memory, over all ranks.
            plan: the plan without them.
        """
        if self.is_traded and self._max_loss:
            return self._fastest(space, more)
        return self.find_least_loss(space, more, near=plan)

    def check_time(self, plan: list[ShardingOption]) -> None:
        """Raises if a plan exceeds the bound on time.

        Raises:
            PlannerError: the plan is too slow.
        """
        if self._max_time is None or not plan:
            return
        step_time = self._perf_model.rate(plan)
        if step_time > self._max_time:
            raise self._too_slow(step_time)

    def _too_slow(self, step_time: float) -> PlannerError:
        return PlannerError(
            error_type=PlannerErrorType.STRICT_CONSTRAINTS,
            message=f"max_step_time is {self._max_time:g} ms, but the plan that was found takes "
            f"{step_time:.3g} ms a step on the slowest rank, and no faster one that keeps to the "
            "bounds on losses: allow more time or more loss, or name other kernels.",
        )

    def refusal(self, space: list[ShardingOption]) -> PlannerError | None:
        """The error to raise if no plan fits because of bounds on time or loss; None if these are
        not the reason.

        Args:
            space: the enumerated options.
        """
        if self._max_time is not None:
            slow = self.find_least_loss(space, any_time=True)
            if slow is not None:
                return self._too_slow(slow.time)
        enumerator = self._enumerator()
        bounds = {o.name: b for o in space if (b := enumerator.max_loss(o)) is not None}
        if self._max_loss is None and not bounds:
            return None
        minimum = self.find_least_loss(space, any_loss=True, any_time=True)
        if minimum is None:
            return None
        lost = sorted(
            f"{full_name(option)!r} {loss.value:.4f} on {kernel_of(option)} ({loss})"
            for option in minimum.options
            if (loss := enumerator.loss(option)).is_lossy
        )
        return PlannerError(
            error_type=PlannerErrorType.STRICT_CONSTRAINTS,
            message=f"No plan fits within max_quality_loss, which is {self._max_loss} for all "
            f"tables together and {bounds} by table. The least possible loss is an estimated "
            f"{minimum.loss:.4f}: {'; '.join(lost)}. Allow more loss or memory, or other kernels.",
        )

    def _fastest(self, space: list[ShardingOption], more: int = 0) -> FittingPlan | None:
        """The fastest plan within the bound on loss."""
        assert self._max_loss is not None
        topology, minimum = (
            _with_more(self._available_topology(), more),
            self.find_least_loss(space, more),
        )
        if minimum is None:
            return None
        thinning = EVERY_VARIANT
        if _are_many(space):
            thinning = Thinning.coarse(None, self._bounded(space)).refined(_chosen(minimum.options))
        levels = self._levels(space, topology, thinning=thinning)
        if any(not table.all for table in levels.values()):
            return None
        allowed = [
            [level for level in table.all if level.loss.value <= self._max_loss]
            for table in levels.values()
        ]
        option_selector = self._option_selector(topology, self._max_loss)
        return option_selector.find_fastest(allowed, [minimum.options])

    def _levels(
        self,
        space: list[ShardingOption],
        topology: Topology,
        any_loss: bool = False,
        thinning: Thinning = EVERY_VARIANT,
    ) -> dict[Table, TableLevels]:
        enumerator = self._enumerator()
        bound = (lambda _: None) if any_loss else enumerator.max_loss
        return levels_of(self._all_options(space, thinning), topology, enumerator.loss, bound)

    def _option_selector(self, topology: Topology, max_loss: float = math.inf) -> OptionSelector:
        fill_in = self._enumerator().estimate_times
        return OptionSelector(topology, self._partitioner, self._perf_model, fill_in, max_loss)


def _chosen(plan: Sequence[ShardingOption]) -> dict[Table, BackendOptions]:
    """The options of tables on backends."""
    return {(o.path, o.name): o.backend_options for o in plan if is_backend_option(o)}


def _are_many(space: Sequence[ShardingOption]) -> bool:
    """Whether there are so many tables that not all of their sizes are tried."""
    return len({(option.path, option.name) for option in space}) > FEW_TABLES


def _with_more(topology: Topology, more: int) -> Topology:
    """A topology with ``more`` bytes added: HBM, or host memory on CPUs."""
    if not more:
        return topology
    wider = copy.deepcopy(topology)
    each = more // len(wider.devices)
    on_host = wider.compute_device == "cpu"
    for device in wider.devices:
        device.storage += Storage(hbm=0 if on_host else each, ddr=each if on_host else 0)
    return wider
