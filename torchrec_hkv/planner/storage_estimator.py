"""TorchRec's memory estimate, with the backends' estimates for their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import OptimizerSpec, StorageBytes
from torchrec_hkv.backends.workload import Workload
from torchrec_hkv.compat import sharder_fused_params, stock_table_bytes
from torchrec_hkv.planner.options import (
    BackendShardingOption,
    distinct,
    is_backend_option,
    shards_of,
)
from torchrec_hkv.planner.workload import shard_workload
from torchrec_hkv.sharding.kernels.optimizer import applied_optimizer


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's memory estimate, with the backends' estimates for their tables.

    Communication buffers are estimated by TorchRec for all tables.
    """

    def __init__(self, topology: Topology, constraints: dict[str, ParameterConstraints]) -> None:
        """
        Args:
            topology: the topology of the ranks.
            constraints: constraints as translated for TorchRec's planner.
        """
        super().__init__(topology=topology, constraints=constraints)
        self._device_type = topology.compute_device
        self._of_ranks, self._by_table = topology, constraints
        self._handed_on: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fills in the memory of every shard.

        Args:
            sharding_options: options on stock kernels and on backends.
            args: further arguments, which depend on the version of TorchRec.
            kwargs: further keyword arguments.
        """
        self._handed_on = (args, kwargs)
        super().estimate(sharding_options, *args, **kwargs)
        on_host = self._device_type == "cpu"
        for option in filter(is_backend_option, sharding_options):
            fused_params = sharder_fused_params(option, args, kwargs)
            optimizer = applied_optimizer(option.name, option.tensor, fused_params)
            storages = self._storage(option, optimizer, self._load(option))
            for shard, counted, shard_storage in zip(
                option.shards, stock_table_bytes(option), storages, strict=True
            ):
                shard.storage += shard_storage
                shard.storage -= Storage(0, counted) if on_host else Storage(counted, 0)

    def estimate_variants(self, options: list[BackendShardingOption]) -> None:
        """Fills in the memory of variants of options that were estimated before.

        Args:
            options: the variants.
        """
        args, kwargs = self._handed_on
        of_origin: dict[int, tuple[list[Storage], OptimizerSpec, Workload]] = {}
        for option in options:
            origin = option.origin
            assert origin is not None
            if id(origin) not in of_origin:
                fused_params = sharder_fused_params(option, args, kwargs)
                optimizer = applied_optimizer(option.name, option.tensor, fused_params)
                load = self._load(origin)
                # Communication buffers, which variants do not change.
                buffers = [
                    (shard.storage or Storage(0, 0)) - shard_storage
                    for shard, shard_storage in zip(
                        origin.shards, self._storage(origin, optimizer, load), strict=True
                    )
                ]
                of_origin[id(origin)] = (buffers, optimizer, load)
            buffers, optimizer, load = of_origin[id(origin)]
            storages = self._storage(option, optimizer, load)
            sums: dict[tuple[int, int, int, int], Storage] = {}
            for shard, buffer, shard_storage in zip(option.shards, buffers, storages, strict=True):
                key = (buffer.hbm, buffer.ddr, shard_storage.hbm, shard_storage.ddr)
                shard.storage = sums.setdefault(key, buffer + shard_storage)

    def _load(self, option: BackendShardingOption) -> Workload:
        return shard_workload(option, self._of_ranks, self._by_table.get(option.name), None)

    def _storage(
        self, option: BackendShardingOption, optimizer: OptimizerSpec, load: Workload
    ) -> list[Storage]:
        """Memory of each shard's table, and temporary memory of a step."""
        backend = registry.get(option.backend)
        replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
        by_size: dict[tuple[int, int], Storage] = {}
        shards = shards_of(option)
        for shard in distinct(shards):
            table = backend.storage(shard, optimizer, self._device_type)
            scratch = backend.scratch(shard, load, self._device_type, replicated)
            by_size[shard.capacity, shard.dim] = Storage(
                hbm=table.hbm + scratch.hbm, ddr=table.host + scratch.host
            )
        return [by_size[shard.capacity, shard.dim] for shard in shards]

    def table_bytes(
        self, option: ShardingOption, fused_params: Mapping[str, Any] | None
    ) -> list[StorageBytes]:
        """Memory of each shard of a table, without communication buffers.

        Args:
            option: an option on a stock kernel or a backend.
            fused_params: fused parameters of the sharder of the option's module.
        """
        if not is_backend_option(option):
            return [self._stock_bytes(option, count) for count in stock_table_bytes(option)]
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        backend = registry.get(option.backend)
        return [backend.storage(shard, optimizer, self._device_type) for shard in shards_of(option)]

    def _stock_bytes(self, option: ShardingOption, count: int) -> StorageBytes:
        if self._device_type == "cpu":
            return StorageBytes(hbm=0, host=count)
        if not option.compute_kernel.startswith(EmbeddingComputeKernel.FUSED_UVM.value):
            return StorageBytes(hbm=count, host=0)
        is_cached = option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        ratio = (option.cache_load_factor or UVM_CACHING_RATIO) if is_cached else 0.0
        return StorageBytes(hbm=round(count * ratio), host=count)
