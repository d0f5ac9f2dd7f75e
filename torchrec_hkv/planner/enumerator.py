"""The ways to shard each table: TorchRec's, where backends stand beside stock kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology

from torchrec_hkv.backends import registry
from torchrec_hkv.planner.constraints import Assignment
from torchrec_hkv.planner.estimators import PerfEstimator, StorageEstimator
from torchrec_hkv.planner.options import balance, is_ours, shards_of
from torchrec_hkv.sharding.optimizer import applied_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.sharders import BackendEmbeddingBagCollectionSharder
from torchrec_hkv.sharding.validation import served_sharding_types


class BackendEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator for constraints that were translated for it."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        assigned: Mapping[str, Assignment],
    ) -> None:
        """
        Args:
            topology: of the ranks.
            batch_size: on each rank.
            constraints: as TorchRec's planner understands them.
            assigned: the backends, by table.
        """
        self.storage_estimator = StorageEstimator(topology, constraints, assigned)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=[PerfEstimator(topology, constraints, assigned), self.storage_estimator],
        )
        self._assigned = assigned

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """TorchRec's hook: called with the options of all tables before any is chosen.

        Raises:
            ValueError: a backend can't serve its table so.
        """
        for option in filter(is_ours, sharding_options):
            assignment = self._assigned[option.name]
            balance(option, assignment)
            backend = registry.get(assignment.backend)
            fused_params = self._sharder_map[option.module_type_key].fused_params
            optimizer = applied_optimizer(option.name, option.tensor, fused_params)
            for shard in shards_of(option, assignment):
                backend.check(shard, optimizer, self._compute_device)
        super().populate_estimates(sharding_options)

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], *args: Any
    ) -> list[str]:
        assignment = self._assigned.get(name)
        allowed = allowed_sharding_types
        if assignment is not None and assignment.is_only_choice:
            served = served_sharding_types(assignment.backend)
            allowed = [sharding_type for sharding_type in allowed if sharding_type in served]
        elif assignment is None and not self._names_types(name):
            # Our sharder offers types for tables that share a collection with ours.
            sharder = self._sharder_map.get(args[0]) if args else None
            added = (
                sharder.added_sharding_types(self._compute_device)
                if isinstance(sharder, BackendEmbeddingBagCollectionSharder)
                else []
            )
            allowed = [sharding_type for sharding_type in allowed if sharding_type not in added]
        return super()._filter_sharding_types(name, allowed, *args)

    def _names_types(self, name: str) -> bool:
        constraint = (self._constraints or {}).get(name)
        return constraint is not None and bool(constraint.sharding_types)

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        # TorchRec lets a table without constraints have any kernel that the sharder knows.
        assignment = self._assigned.get(name)
        is_served = assignment is not None and sharding_type in served_sharding_types(
            assignment.backend
        )
        allowed = [kernel for kernel in allowed_compute_kernels if kernel != KERNEL or is_served]
        return super()._filter_compute_kernels(name, allowed, sharding_type)
