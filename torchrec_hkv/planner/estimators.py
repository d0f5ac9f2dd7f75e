"""Time and memory of tables that backends serve, next to TorchRec's estimates for stock tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import StorageBytes
from torchrec_hkv.compat import sharder_fused_params, stock_table_bytes
from torchrec_hkv.planner.constraints import Assignment
from torchrec_hkv.planner.options import is_ours, shards_of
from torchrec_hkv.sharding.optimizer import applied_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL


class PerfEstimator(ShardEstimator):
    """TorchRec's time estimate, where each backend says how fast it reads rows."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        assigned: Mapping[str, Assignment],
    ) -> None:
        """
        Args:
            topology: of the ranks.
            constraints: as TorchRec's planner understands them.
            assigned: the backends, by table.
        """
        self._assigned = assigned
        self._stock = self._estimator(topology, constraints, EmbeddingPerfEstimatorConfig())
        self._by_backend: dict[str, ShardEstimator] = {}
        for name in {assignment.backend for assignment in assigned.values()}:
            config = EmbeddingPerfEstimatorConfig()
            bandwidth = registry.get(name).lookup_bandwidth(
                topology.compute_device, topology.hbm_mem_bw, topology.ddr_mem_bw
            )
            # A dictionary of its own: the class's is shared by all estimators of the process.
            config.kernel_device_bandwidths = {
                **config.kernel_device_bandwidths,
                (topology.compute_device, KERNEL): bandwidth,
            }
            self._by_backend[name] = self._estimator(topology, constraints, config)

    @staticmethod
    def _estimator(
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        config: EmbeddingPerfEstimatorConfig,
    ) -> ShardEstimator:
        return EmbeddingPerfEstimatorFactory.create_with_config(
            config, topology=topology, constraints=constraints
        )

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fills in the time of every shard.

        Args:
            sharding_options: stock and ours.
            args: what TorchRec hands on, which differs between its versions.
            kwargs: likewise.
        """
        stock = [option for option in sharding_options if not is_ours(option)]
        self._stock.estimate(stock, *args, **kwargs)
        for name, estimator in self._by_backend.items():
            ours = [
                option
                for option in sharding_options
                if is_ours(option) and self._assigned[option.name].backend == name
            ]
            estimator.estimate(ours, *args, **kwargs)


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's memory estimate, where each backend says what its tables take.

    The communication buffers are TorchRec's count for both kinds of tables.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        assigned: Mapping[str, Assignment],
    ) -> None:
        """
        Args:
            topology: of the ranks.
            constraints: as TorchRec's planner understands them.
            assigned: the backends, by table.
        """
        super().__init__(topology=topology, constraints=constraints)
        self._assigned = assigned
        self._device_type = topology.compute_device

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fills in the bytes of every shard.

        Args:
            sharding_options: stock and ours.
            args: what TorchRec hands on, which differs between its versions.
            kwargs: likewise.
        """
        super().estimate(sharding_options, *args, **kwargs)
        for option in filter(is_ours, sharding_options):
            fused_params = sharder_fused_params(option, args, kwargs)
            tables = self.table_bytes(option, fused_params)
            for shard, counted, table in zip(
                option.shards, stock_table_bytes(option), tables, strict=True
            ):
                on_host = self._device_type == "cpu"
                shard.storage += Storage(
                    hbm=table.hbm - (0 if on_host else counted),
                    ddr=table.host - (counted if on_host else 0),
                )

    def table_bytes(
        self, option: ShardingOption, fused_params: Mapping[str, Any] | None
    ) -> list[StorageBytes]:
        """What each shard of a table takes by itself, without communication buffers.

        Args:
            option: stock or ours.
            fused_params: those of the sharder of the option's module.
        """
        if not is_ours(option):
            return [self._stock_bytes(option, count) for count in stock_table_bytes(option)]
        assignment = self._assigned[option.name]
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        backend = registry.get(assignment.backend)
        return [
            backend.storage(shard, optimizer, self._device_type)
            for shard in shards_of(option, assignment)
        ]

    def _stock_bytes(self, option: ShardingOption, count: int) -> StorageBytes:
        if self._device_type == "cpu":
            return StorageBytes(hbm=0, host=count)
        if not option.compute_kernel.startswith(EmbeddingComputeKernel.FUSED_UVM.value):
            return StorageBytes(hbm=count, host=0)
        is_cached = option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        ratio = (option.cache_load_factor or UVM_CACHING_RATIO) if is_cached else 0.0
        return StorageBytes(hbm=round(count * ratio), host=count)
