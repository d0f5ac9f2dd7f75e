"""TorchRec's planner, extended for tables on backends."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner as StockEmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.types import ParameterConstraints as StockParameterConstraints
from torchrec.distributed.types import ModuleSharder

from torchrec_hkv import environment
from torchrec_hkv.collective import on_leader
from torchrec_hkv.planner.calibration import Calibration, calibration_for
from torchrec_hkv.planner.constraints import choices, translated
from torchrec_hkv.planner.defaults import completed
from torchrec_hkv.planner.enumerator import BackendEnumerator
from torchrec_hkv.planner.least_loss import LeastLoss
from torchrec_hkv.planner.loss_report import loss_reports
from torchrec_hkv.planner.memory import ReportedPlan, rank_memory
from torchrec_hkv.planner.missing_memory import missing_bytes, refusal, smallest_options, too_large
from torchrec_hkv.planner.model_checks import check_model
from torchrec_hkv.planner.options import disadvantage
from torchrec_hkv.planner.partitioner import SearchingPartitioner
from torchrec_hkv.planner.proposer import LossOrderedProposer
from torchrec_hkv.planner.quality_curve import check_loss, check_time
from torchrec_hkv.planner.rejections import why_rejected
from torchrec_hkv.planner.report import LossReport, ReplicaGroups
from torchrec_hkv.planner.table_reports import TableReporter
from torchrec_hkv.progress import reported
from torchrec_hkv.sharding.modules.sharders import get_default_sharders
from torchrec_hkv.warn import warn

logger: logging.Logger = logging.getLogger(__name__)

#: Above this number of tables with alternatives, fewer options of each are explained.
_MANY = 32


class EmbeddingShardingPlanner(StockEmbeddingShardingPlanner):
    """Plans on which ranks each table is, and which kernel or backend serves it.

    Example::

        constraints = {"user": ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions())}
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
        print(plan)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        constraints: dict[str, StockParameterConstraints] | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = None,
        shard_by_batch_size: bool = False,
        max_quality_loss: float | None = None,
        max_step_time: float | None = None,
        replica_groups: int = 1,
        sync_every: int = 1,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            topology: the topology of the ranks (of one group if there are several); None for
                TorchRec's default.
            batch_size: batch size of each rank. None: the environment variable
                ``TORCHREC_HKV_BATCH_SIZE``, else TorchRec's default of 512.
            enumerator: must be None: the planner uses its own enumerator, which knows backends.
            constraints: constraints by table; compute kernels may name backends. Among the plans
                that fit, the planner prefers those in which the fewest tables lose quality, then
                those with the least estimated loss, then the fastest (docs/concepts/planner.md).
            calibration: measured constants for time estimates, or their file, as written by
                ``torchrec-hkv calibrate``. None: the default file
                (:func:`torchrec_hkv.planner.default_path`) if it exists, else nominal bandwidths.
            shard_by_batch_size: True: stock tables with an open sharding type are replicated if
                they have at most ``batch_size`` rows, and sharded otherwise. False: the estimates
                decide.
            max_quality_loss: loss of all tables together that may be traded for time, in the unit
                of their curves (AUC by default). The planner takes the fastest plan within the
                bound, and raises if none fits. 0: no loss is allowed. None: only as much loss as
                the memory requires.
            max_step_time: bound on the estimated time that the tables of the slowest rank take in
                a step, in milliseconds. Among the plans within the bound, the planner takes the one
                with the least loss (and within ``max_quality_loss``, if given). None: no bound.
            replica_groups: number of groups of ranks that each hold all tables, in a
                :class:`torchrec_hkv.DMPCollection`. The report then says what a sync sends.
            sync_every: number of steps from one sync to the next.
            kwargs: other arguments of TorchRec's planner.

        Raises:
            ValueError: an enumerator was given; or a constraint (see
                :func:`torchrec_hkv.planner.constraints.choices`), the calibration, a bound on loss
                or time, or a number of groups or steps is invalid.
        """
        if enumerator is not None:
            raise ValueError(
                f"The planner was given enumerator {type(enumerator).__name__}, which does not "
                "know backends: leave it None."
            )
        # TorchRec's own report does not distinguish backends; the plan prints another report.
        kwargs.setdefault("stats", [])
        if kwargs.get("partitioner") is None:
            kwargs["partitioner"] = SearchingPartitioner()
        check_loss("max_quality_loss", max_quality_loss)
        check_time("max_step_time", max_step_time)
        for what, number in (("replica_groups", replica_groups), ("sync_every", sync_every)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{what} is {number!r}, but must be an integer, at least 1.")
        self._replicas = ReplicaGroups(replica_groups, sync_every)
        if batch_size is None:
            batch_size = environment.number("BATCH_SIZE", None)
        self._user_constraints, self._shard_by_batch_size = constraints, shard_by_batch_size
        self._choices = choices(constraints)
        self._warned: set[tuple[str, str]] = set()
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=translated(constraints, self._choices),
            **kwargs,
        )
        self._measured = calibration_for(self._topology.compute_device, calibration)
        self._max_quality_loss = max_quality_loss
        self._space: list[ShardingOption] = []
        self._least_loss = LeastLoss(
            lambda: self._enumerator,
            self._available_topology,
            self._partitioner,
            self._perf_model,
            max_quality_loss,
            max_step_time,
        )
        self._proposers = [
            LossOrderedProposer(
                self._proposers if kwargs.get("proposer") else None,
                self._lossless_options,
                self._least_loss.lossless_plan,
                self._least_loss.proposals,
            )
        ]
        self._make_enumerator()

    def _available_topology(self) -> Topology:
        """Topology with the memory available for tables, for the current plan."""
        topology = self._storage_reservation.last_reserved_topology
        return self._topology if topology is None else topology

    def _lossless_options(self, space: list[ShardingOption]) -> list[ShardingOption]:
        """The options without loss. Also stores all options for the report."""
        self._space = space
        return self._least_loss.without_loss(space)

    def _make_enumerator(self) -> None:
        self._enumerator: BackendEnumerator = BackendEnumerator(
            self._topology,
            self._batch_size,
            self._constraints or {},
            self._choices,
            self._measured,
        )

    def _complete(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> None:
        """Completes the constraints from environment variables and the batch size."""
        constraints = completed(
            self._user_constraints,
            module,
            sharders,
            self._batch_size,
            self._topology.compute_device,
            self._shard_by_batch_size,
        )
        if constraints != (self._user_constraints or {}):
            self._choices = choices(constraints)
            self._constraints = translated(constraints, self._choices)
            self._make_enumerator()

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ReportedPlan:
        """Plans on this process.

        Args:
            module: the model.
            sharders: :func:`torchrec_hkv.get_default_sharders`, or others that include one for
                backends.

        Raises:
            ValueError: a backend can't serve a table whose constraint names it.
            PlannerError: no plan fits; the message names tables and the missing bytes.
        """
        begin = time.perf_counter()
        with reported("Planning", unit=" plans"):
            plan = self._reported_plan(module, sharders)
        tables = sum(len(module_plan.reports) for module_plan in plan.plan.values())
        logger.info("Planned %d tables in %.1f s:\n%s", tables, time.perf_counter() - begin, plan)
        return plan

    def _reported_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ReportedPlan:
        self._complete(module, sharders)
        check_model(module, sharders, self._choices, self._constraints or {})
        self._space = []
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            raise self._explained(error, module, sharders) from error
        self._least_loss.check_time(self._best_plan or [])
        options = {(option.path, option.name): option for option in self._best_plan or []}
        rejected = self._rejections(module, sharders)
        losses = self._loss_reports(rejected)
        self._warn(options.values())
        reporter = TableReporter(
            self._topology,
            self._constraints or {},
            self._choices,
            self._enumerator,
            self._measured,
            self._replicas,
        )
        plans = {
            path: reporter.module_plan(path, module_plan, options, rejected, losses, sharders)
            for path, module_plan in plan.plan.items()
        }
        topology = self._storage_reservation.last_reserved_topology
        memory = [] if topology is None else rank_memory(plans.values(), options.values(), topology)
        return ReportedPlan(plans, memory)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ReportedPlan:
        """Plans on rank 0, and returns the plan, or raises the error, on every rank.

        Args:
            module: the model.
            sharders: None for :func:`torchrec_hkv.get_default_sharders`.
            pg: the ranks; None for all.

        Raises:
            ValueError: see :meth:`plan`.
            PlannerError: see :meth:`plan`.
        """
        sharders = get_default_sharders() if sharders is None else sharders
        return on_leader(lambda: self.plan(module, sharders), pg)

    def _explained(
        self, error: PlannerError, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> PlannerError:
        """An error that names tables and missing bytes if memory is the reason, else TorchRec's."""
        topology = self._storage_reservation.last_reserved_topology
        kinds = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)
        if error.error_type not in kinds or topology is None:
            return error
        space = self._enumerator.enumerate(module, sharders)
        options = self._least_loss.smallest_options(space)
        missing = missing_bytes(smallest_options(options, topology), topology)
        if not missing:
            missing = missing_bytes(smallest_options(options, topology, fit_ranks=False), topology)
        if not missing:
            return self._least_loss.refusal(space) or error
        return PlannerError(
            error_type=PlannerErrorType.INSUFFICIENT_STORAGE,
            message=refusal(missing, topology) + too_large(options, topology),
        )

    def _loss_reports(
        self, rejected: Mapping[tuple[str, str], dict[str, str]]
    ) -> dict[tuple[str, str], LossReport]:
        return loss_reports(
            self._best_plan or [],
            self._enumerator,
            self._least_loss,
            self._space,
            rejected,
            self._available_topology(),
        )

    def _loses_more(self, option: ShardingOption, chosen: ShardingOption) -> bool:
        """Whether an option is ruled out because it loses more than the chosen one."""
        lost, chosen_loss = self._enumerator.loss(option), self._enumerator.loss(chosen)
        more = (lost.is_lossy, lost.value) > (chosen_loss.is_lossy, chosen_loss.value)
        return more and not (
            self._least_loss.is_traded and lost.value <= (self._max_quality_loss or 0.0)
        )

    def _warn(self, options: Iterable[ShardingOption]) -> None:
        """Warns once for each table whose backend is worse than a stock kernel."""
        for option in options:
            reason = disadvantage(option)
            if reason is not None and (option.path, option.name) not in self._warned:
                self._warned.add((option.path, option.name))
                warn(f"Table {option.name!r} is planned on backend {option.backend!r}: {reason}")

    def _rejections(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> dict[tuple[str, str], dict[str, str]]:
        """The reasons why other kernels were not chosen, by path and table."""
        plan, topology = self._best_plan or [], self._storage_reservation.last_reserved_topology
        left_open = [
            option
            for option in plan
            if (choice := self._choices.get(option.name))
            and (not choice.is_settled or choice.leaves_sizes)
            if choice.backends
        ]
        if not left_open or topology is None:
            return {}
        best = self._perf_model.rate(plan)
        by_table: dict[tuple[str, str], list[ShardingOption]] = defaultdict(list)
        # A loaded plan comes without a search space.
        for option in self._space or self._enumerator.enumerate(module, sharders):
            by_table[option.path, option.name].append(option)
        return {
            (chosen.path, chosen.name): why_rejected(
                chosen,
                plan,
                by_table[chosen.path, chosen.name],
                self._enumerator.refused[chosen.path, chosen.name],
                self._least_loss.missing_memory,
                self._least_loss.rating,
                best,
                self._loses_more,
                are_many=len(left_open) > _MANY,
            )
            for chosen in left_open
        }
