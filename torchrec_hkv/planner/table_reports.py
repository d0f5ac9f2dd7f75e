"""What a plan reports of each table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints as StockParameterConstraints
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.compat import stock_table_bytes
from torchrec_hkv.planner.calibration import Calibration
from torchrec_hkv.planner.constraints import KernelChoice
from torchrec_hkv.planner.enumerator import BackendEnumerator
from torchrec_hkv.planner.options import is_backend_option, shards_of
from torchrec_hkv.planner.report import LossReport, ReplicaGroups, ReportedModulePlan, TableReport
from torchrec_hkv.planner.traffic import (
    HostTopology,
    TableLookups,
    Traffic,
    ring_bytes,
    step_traffic,
)
from torchrec_hkv.planner.workload import num_features, rank_bags, rank_ids, shard_workload
from torchrec_hkv.sharding.kernels.optimizer import applied_optimizer
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding


@dataclasses.dataclass(frozen=True)
class TableReporter:
    """Makes the reports of planned tables.

    Attributes:
        topology: the ranks.
        constraints: the constraints, by table.
        choices: what the constraints leave open, by table.
        enumerator: the enumerator of the options.
        measured: the calibration; None for nominal bandwidths.
        replicas: the groups of ranks that each hold all tables.
    """

    topology: Topology
    constraints: Mapping[str, StockParameterConstraints]
    choices: Mapping[str, KernelChoice]
    enumerator: BackendEnumerator
    measured: Calibration | None
    replicas: ReplicaGroups

    def module_plan(
        self,
        path: str,
        module_plan: dict[str, ParameterSharding],
        options: dict[tuple[str, str], ShardingOption],
        rejected: dict[tuple[str, str], dict[str, str]],
        losses: dict[tuple[str, str], LossReport],
        sharders: list[ModuleSharder[nn.Module]],
    ) -> ReportedModulePlan:
        """The plan of a module, with a report of each table.

        Args:
            path: path of the module.
            module_plan: TorchRec's plan of the module.
            options: the chosen options, by path and table.
            rejected: reasons why other kernels were not chosen, by path and table.
            losses: reports of losses, by path and table.
            sharders: the sharders of the model.
        """
        shardings: dict[str, ParameterSharding] = {}
        reports: dict[str, TableReport] = {}
        fused_params = {
            sharder_name(sharder.module_type): getattr(sharder, "fused_params", None)
            for sharder in sharders
        }
        for table, sharding in module_plan.items():
            option = options[path, table]
            described = ""
            if is_backend_option(option):
                sharding = BackendParameterSharding.wrap(
                    sharding, option.backend, option.backend_options
                )
                described = registry.get(option.backend).describe(option.backend_options)
            shardings[table] = sharding
            kernel = option.backend if is_backend_option(option) else option.compute_kernel
            reports[table] = TableReport(
                kernel=kernel,
                sharding_type=option.sharding_type,
                ranks=tuple(sharding.ranks or ()),
                rows=tuple(part.capacity for part in shards_of(option))
                if is_backend_option(option)
                else tuple(shard.size[0] for shard in option.shards),
                dim=option.tensor.shape[1],
                bytes=tuple(
                    self.enumerator.storage_estimator.table_bytes(
                        option, fused_params[option.module_type_key]
                    )
                ),
                options=described,
                times=tuple(shard.perf for shard in option.shards if shard.perf is not None),
                group_time=self.enumerator.perf_estimator.group_time(kernel),
                features=num_features(option),
                bags=rank_bags(option, self.constraints.get(table)),
                ids=rank_ids(option, self.constraints.get(table)),
                rejected=rejected.get((path, table), {}),
                calibrated=self.enumerator.perf_estimator.is_calibrated(option),
                loss=losses.get((path, table)),
                traffic=self._traffic(option),
                sync_bytes=self._sync_bytes(option, fused_params[option.module_type_key]),
            )
        stages = (
            None if self.measured is None else self.measured.stages_of(self.topology.world_size)
        )
        return ReportedModulePlan(shardings, reports, stages, self.replicas)

    def _traffic(self, option: ShardingOption) -> Traffic | None:
        """The traffic between ranks; None if hosts have different sizes."""
        local = min(self.topology.local_world_size, self.topology.world_size)
        if self.topology.world_size % local:
            return None
        constraint = self.constraints.get(option.name)
        rows, columns = option.tensor.shape
        return step_traffic(
            TableLookups(
                option.sharding_type,
                [shard.size[1] for shard in option.shards],
                rank_ids(option, constraint),
                rank_bags(option, constraint),
                option.is_pooled,
                replicated_bytes=registry.get(option.backend).gradient_bytes(shards_of(option)[0])
                if is_backend_option(option)
                else 4 * rows * columns,
            ),
            HostTopology(self.topology.world_size, local),
        )

    def _sync_bytes(self, option: ShardingOption, fused_params: Mapping[str, Any] | None) -> float:
        """What a rank sends for each shard of a table in a sync."""
        groups = self.replicas.groups
        if groups == 1 or option.sharding_type == ShardingType.DATA_PARALLEL.value:
            return 0.0
        if not is_backend_option(option):
            return ring_bytes(max(stock_table_bytes(option)), groups)
        here, anywhere = (
            shard_workload(
                option,
                self.topology,
                self.constraints.get(option.name),
                self.choices[option.name].frequencies,
                batches=self.replicas.sync_every * number,
            ).distinct
            for number in (1, groups)
        )
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        backend, device = registry.get(option.backend), self.topology.compute_device
        return max(
            backend.sync_bytes(shard, optimizer, here, anywhere, groups, device)
            for shard in shards_of(option)
        )
