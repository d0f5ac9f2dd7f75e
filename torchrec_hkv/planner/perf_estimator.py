"""TorchRec's time estimate, extended by backends and by measured constants."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.workload import StepTime
from torchrec_hkv.compat import sharder_fused_params, stock_table_bytes
from torchrec_hkv.planner.calibration import Calibration
from torchrec_hkv.planner.constraints import KernelChoice
from torchrec_hkv.planner.options import BackendShardingOption, is_backend_option, shards_of
from torchrec_hkv.planner.stock_kernels import FUSED, fused_work
from torchrec_hkv.planner.workload import shard_workload
from torchrec_hkv.sharding.kernels.optimizer import applied_optimizer
from torchrec_hkv.sharding.parameter_sharding import KERNEL


class PerfEstimator(ShardEstimator):
    """TorchRec's time estimate, with measured times of lookups and backwards.

    Exchanges are estimated by TorchRec. Without measured constants, each backend gives the
    bandwidth with which it reads rows.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        choices: Mapping[str, KernelChoice],
        calibration: Calibration | None = None,
    ) -> None:
        """
        Args:
            topology: the topology of the ranks.
            constraints: constraints as translated for TorchRec's planner.
            choices: the kernels that may serve each table.
            calibration: measured constants; None for none.
        """
        self._topology = topology
        self._constraints = constraints
        self._choices = choices
        self._measured = {} if calibration is None else calibration.constants
        self._rank_bytes = 0.0
        self._handed_on: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        rate = None if calibration is None else calibration.exchange
        #: Factor for TorchRec's estimates of exchanges, which use the topology's bandwidth within a
        #: host; 0 for a single rank, which exchanges nothing; None for no correction.
        self._exchange: float | None = None
        if topology.world_size == 1:
            self._exchange = 0.0
        elif rate is not None and topology.world_size <= topology.local_world_size:
            self._exchange = topology.intra_host_bw / rate
        self._stock = self._estimator(topology, constraints, EmbeddingPerfEstimatorConfig())
        self._by_backend: dict[str, ShardEstimator] = {}
        for name in {name for choice in choices.values() for name in choice.backends}:
            config = EmbeddingPerfEstimatorConfig()
            bandwidth = registry.get(name).lookup_bandwidth(
                topology.compute_device, topology.hbm_mem_bw, topology.ddr_mem_bw
            )
            # Copied, because the class's dictionary is shared by all estimators of the process.
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
            sharding_options: options on stock kernels and on backends.
            args: further arguments, which depend on the version of TorchRec.
            kwargs: further keyword arguments.
        """
        self._rank_bytes = self._bytes_of_a_rank(sharding_options) if self._measured else 0.0
        self._handed_on = (args, kwargs)
        self._estimate(sharding_options, *args, **kwargs)

    def estimate_variants(self, options: list[BackendShardingOption]) -> None:
        """Fills in the time of variants of options that were estimated before.

        Args:
            options: the variants.
        """
        args, kwargs = self._handed_on
        for option in options:
            assert option.stock_times is not None
            for shard, time in zip(option.shards, option.stock_times, strict=True):
                shard.perf = copy.copy(time)
            self._correct(option, sharder_fused_params(option, args, kwargs))
            if self._measured and self._exchange is not None:
                _scale_exchanges(option, self._exchange)

    def _estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        stock = [option for option in sharding_options if not is_backend_option(option)]
        _estimate_distinct(self._stock, stock, args, kwargs)
        if FUSED in self._measured:
            self._measure_stock(stock, args, kwargs)
        for name, estimator in self._by_backend.items():
            backend_options = [
                o for o in sharding_options if is_backend_option(o) and o.backend == name
            ]
            _estimate_distinct(estimator, backend_options, args, kwargs)
            for option in backend_options:
                option.stock_times = [copy.copy(shard.perf) for shard in option.shards]
                self._correct(option, sharder_fused_params(option, args, kwargs))
        if self._measured and self._exchange is not None:
            for option in sharding_options:
                _scale_exchanges(option, self._exchange)

    def _correct(
        self, option: BackendShardingOption, fused_params: Mapping[str, Any] | None
    ) -> None:
        """Replaces TorchRec's times of lookups and backwards, and of exchanging the gradients of
        replicated tables, which TorchRec assumes to be as large as the rows."""
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            sent = registry.get(option.backend).gradient_bytes(shards_of(option)[0])
            size = option.tensor.element_size() * option.tensor.shape.numel()
            for shard in option.shards:
                assert shard.perf is not None
                shard.perf.bwd_comms *= sent / size
        if option.backend in self._measured:
            _set_times(option, self._backend_times(option, fused_params))
        else:
            self._slow_down(option, fused_params)

    def _bytes_of_a_rank(self, options: list[ShardingOption]) -> float:
        """Mean bytes of tables on a rank, with the smallest option of each table. Tables share the
        caches of a device, so a small table among others is read like a large one."""
        minimum: dict[tuple[str, str], int] = {}
        for option in options:
            counts = stock_table_bytes(option)
            if is_backend_option(option):
                backend = registry.get(option.backend)
                selected = [
                    backend.storage(shard, None, self._topology.compute_device)
                    for shard in shards_of(option)
                ]
                counts = [part.hbm + part.host for part in selected]
            key = (option.path, option.name)
            minimum[key] = min(sum(counts), minimum.get(key, sum(counts)))
        return sum(minimum.values()) / self._topology.world_size

    def group_time(self, kernel: str) -> StepTime | None:
        """Constant time of a group of tables on one kernel; None if unknown.

        Args:
            kernel: name of a backend or of a stock kernel.
        """
        found = self._measured.get(kernel)
        return None if found is None else found.group_time

    def is_calibrated(self, option: ShardingOption) -> bool:
        """Whether the times of an option come from measured constants."""
        return (option.backend if is_backend_option(option) else FUSED) in self._measured

    def _backend_times(
        self, option: BackendShardingOption, fused_params: Mapping[str, Any] | None
    ) -> list[StepTime]:
        backend, device_type = registry.get(option.backend), self._topology.compute_device
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        choice = self._choices[option.name]
        load = shard_workload(
            option, self._topology, self._constraints.get(option.name), choice.frequencies
        )
        times = []
        for shard in shards_of(option):
            storage = backend.storage(shard, optimizer, device_type)
            times.append(
                self._measured[option.backend].time(
                    backend.work(shard, optimizer, load, device_type),
                    max(storage.hbm + storage.host, self._rank_bytes, 1),
                )
            )
        return times

    def _slow_down(
        self, option: BackendShardingOption, fused_params: Mapping[str, Any] | None
    ) -> None:
        """Slows down lookups and backwards for rows in host memory, by the ratio of bandwidths."""
        backend, device_type = registry.get(option.backend), self._topology.compute_device
        optimizer = applied_optimizer(option.name, option.tensor, fused_params)
        load = shard_workload(
            option,
            self._topology,
            self._constraints.get(option.name),
            self._choices[option.name].frequencies,
        )
        slower = self._topology.hbm_mem_bw / self._topology.hbm_to_ddr_mem_bw
        for shard, part in zip(option.shards, shards_of(option), strict=True):
            share = backend.far_share(part, optimizer, load, device_type)
            if share and shard.perf is not None:
                factor = 1 + share * (slower - 1)
                shard.perf.fwd_compute *= factor
                shard.perf.bwd_compute *= factor

    def _measure_stock(
        self, options: list[ShardingOption], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Estimates stock tables by the constants of ``fused``. Times of other stock kernels are
        scaled by the ratio of TorchRec's estimates."""
        twins = [copy.deepcopy(option) for option in options]
        for twin in twins:
            twin.compute_kernel = FUSED
        self._stock.estimate(twins, *args, **kwargs)
        for option, twin in zip(options, twins, strict=True):
            measured = self._fused_times(option)
            times = []
            for shard, fused, time in zip(option.shards, twin.shards, measured, strict=True):
                assert shard.perf is not None
                assert fused.perf is not None
                forward = shard.perf.fwd_compute / max(fused.perf.fwd_compute, 1e-30)
                backward = shard.perf.bwd_compute / max(fused.perf.bwd_compute, 1e-30)
                times.append(StepTime(time.forward * forward, time.backward * backward))
            _set_times(option, times)

    def _fused_times(self, option: ShardingOption) -> list[StepTime]:
        choice = self._choices.get(option.name)
        load = shard_workload(
            option,
            self._topology,
            self._constraints.get(option.name),
            None if choice is None else choice.frequencies,
        )
        return [
            self._measured[FUSED].time(
                fused_work(load, shard.size[1], count, shard.size[0]),
                max(count, self._rank_bytes, 1),
            )
            for shard, count in zip(option.shards, stock_table_bytes(option), strict=True)
        ]


def _estimate_distinct(
    estimator: ShardEstimator,
    options: Sequence[ShardingOption],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Estimates the times of one shard of each size and copies them to the others: TorchRec's times
    depend on a shard's size only."""
    of_all = [option.shards for option in options]
    for option in options:
        firsts: dict[tuple[int, ...], Shard] = {}
        for shard in option.shards:
            firsts.setdefault(tuple(shard.size), shard)
        option.shards = list(firsts.values())
    try:
        estimator.estimate(options, *args, **kwargs)
    finally:
        estimated = [option.shards for option in options]
        for option, shards in zip(options, of_all, strict=True):
            option.shards = shards
    for firsts_of_one, shards in zip(estimated, of_all, strict=True):
        times = {tuple(shard.size): shard for shard in firsts_of_one}
        for shard in shards:
            first = times[tuple(shard.size)]
            if shard is not first:
                shard.perf = copy.copy(first.perf)


def _set_times(option: ShardingOption, times: list[StepTime]) -> None:
    for shard, time in zip(option.shards, times, strict=True):
        assert shard.perf is not None
        shard.perf.fwd_compute, shard.perf.bwd_compute = time.forward, time.backward


def _scale_exchanges(option: ShardingOption, factor: float) -> None:
    for shard in option.shards:
        if (perf := shard.perf) is not None:
            perf.input_dist_comms *= factor
            perf.fwd_comms *= factor
            # The backward sends back what the forward sent. TorchRec's estimate adds a copy that
            # this package does not make (:mod:`.sharding.output_dist`), which would dominate.
            # Replicated tables only exchange gradients.
            perf.bwd_comms = perf.fwd_comms if perf.fwd_comms else perf.bwd_comms * factor
