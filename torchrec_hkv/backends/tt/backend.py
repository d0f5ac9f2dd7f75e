"""The backend ``tt`` for sharding, planner and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.optimizers import state_width
from torchrec_hkv.backends.protocol import (
    Backend,
    BackendOptions,
    Kept,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.tt.cost import tt_cases, tt_scratch, tt_work
from torchrec_hkv.backends.tt.lookup import TTLookup
from torchrec_hkv.backends.tt.options import TTOptions
from torchrec_hkv.backends.tt.table import head_bytes, optimizer_of, options_of, shape_of, state_of
from torchrec_hkv.backends.tt.variants import kept_quality, rank_variants
from torchrec_hkv.backends.workload import IdFrequencies, Work, Workload
from torchrec_hkv.tensor_train import TTGroup
from torchrec_hkv.tensor_train.fused_rows import check_hot_row_optimizer
from torchrec_hkv.tensor_train.shape_advice import why_dense_is_smaller

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_RANK_ON_CUDA = 256


class TTBackend(Backend):
    """The backend ``tt``: Tensor-Train tables.

    For each table a ``state_dict`` holds ``tt_core_k`` (``[p_k][r_{k-1}][q_k][r_k]``; the last core
    ``[p_d][q_d][r_{d-1}]``), ``tt_state_k``, ``optimizer_step``, ``tt_shape``, and ``tt_cache_…``
    of a cache.
    """

    name: ClassVar[str] = "tt"
    options_type: ClassVar[type[BackendOptions]] = TTOptions
    sharding_types: ClassVar[tuple[str, ...]] = (
        ShardingType.TABLE_WISE.value,
        ShardingType.DATA_PARALLEL.value,
    )
    routing: ClassVar[Literal["hashed", "block"]] = "block"

    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        shape = shape_of(shard)
        if shard.capacity != shard.num_embeddings or shard.dim != shard.embedding_dim:
            raise ValueError(
                f"table '{shard.name}': a shard has {shard.capacity} of {shard.num_embeddings} "
                f"rows and {shard.dim} of {shard.embedding_dim} columns, but backend 'tt' takes "
                "whole tables."
            )
        if shard.dtype not in _DTYPES:
            raise ValueError(
                f"table '{shard.name}': data type is {shard.dtype}, but backend 'tt' takes "
                "torch.float32 and torch.bfloat16."
            )
        low, high = shard.init_range
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, "
                "but both must be finite and the first must not be larger."
            )
        if low + high != 0 and min(shape.ranks) < 2:
            raise ValueError(
                f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, "
                f"whose mean is not 0, but ranks are {list(shape.ranks)}: a mean other than 0 "
                "needs ranks of at least 2."
            )
        if options_of(shard).precision != "fp32" and device_type != "cuda":
            raise ValueError(
                f"table '{shard.name}': precision is {options_of(shard).precision!r}, but on "
                f"{device_type!r} it must be 'fp32'."
            )
        if device_type == "cuda" and max(shape.ranks[-2:]) > _MAX_RANK_ON_CUDA:
            raise ValueError(
                f"table '{shard.name}': ranks are {list(shape.ranks)}, but on a GPU those beside "
                f"the last two cores must be at most {_MAX_RANK_ON_CUDA}."
            )
        try:
            tt_optimizer = optimizer_of(optimizer)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None
        TTGroup([shape], None, tt_optimizer, [shard.name])  # refuses slices that are too large
        cache = options_of(shard).cache
        if cache is None:
            return
        if cache.rows > shard.num_embeddings:
            raise ValueError(
                f"table '{shard.name}': cache_size is {cache.rows}, but the table has "
                f"{shard.num_embeddings} rows."
            )
        try:
            check_hot_row_optimizer(tt_optimizer)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None

    def check_replicas(self, shard: TableShard) -> None:
        if options_of(shard).cache is not None:
            raise ValueError(
                f"Table {shard.name!r} can't be in a DMPCollection with a cache, which each "
                "replica would fill for itself: leave out cache_size, or use "
                "DistributedModelParallel."
            )

    def sync_bytes(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        touched: float,
        touched_anywhere: float,
        replicas: int,
        device_type: str,
    ) -> float:
        # Averages are taken in float32.
        spec = state_of(shard, optimizer)
        values = sum(math.prod(tensor.shape) for name, tensor in spec.items() if name != "tt_shape")
        return 8 * values * (replicas - 1) / replicas

    def gradient_bytes(self, shard: TableShard) -> float:
        return 4 * sum(map(math.prod, shape_of(shard).core_shapes))

    def disadvantage(self, shard: TableShard) -> str | None:
        cache = options_of(shard).cache
        cached_rows = 0 if cache is None else cache.rows
        return why_dense_is_smaller(shape_of(shard), shard.dtype.itemsize, cached_rows)

    def kept(
        self,
        table: TableShard,
        num_embeddings: int,
        dtype: torch.dtype,
        frequencies: IdFrequencies | None,
    ) -> list[Kept]:
        return kept_quality(table, dtype, frequencies)

    def variants(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        device_type: str,
        frequencies: IdFrequencies | None,
    ) -> list[TTOptions]:
        return rank_variants(shard)

    def leaves_sizes_open(self, options: BackendOptions) -> bool:
        return isinstance(options, TTOptions) and options.leaves_ranks_open

    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        shape, tt_optimizer = shape_of(shard), optimizer_of(optimizer)
        on_gpu = device_type == "cuda"
        count = shape.num_elements * shard.dtype.itemsize
        if tt_optimizer is not None or on_gpu:
            count += 4 * shape.num_elements  # the gradient of all cores
        if tt_optimizer is not None:
            for k in range(shape.num_cores):
                count += 4 * shape.p[k] * state_width(optimizer, shape.slice_size(k))
        if on_gpu:
            count += head_bytes(shape)
        if (cache := options_of(shard).cache) is not None:
            count += cache.num_bytes(shape, tt_optimizer)
        return StorageBytes(hbm=count if on_gpu else 0, host=0 if on_gpu else count)

    def scratch(
        self, shard: TableShard, load: Workload, device_type: str, replicated: bool
    ) -> StorageBytes:
        scaled = shard.pooling == "mean"
        count = tt_scratch(shape_of(shard), load, device_type, scaled, replicated)
        return StorageBytes(hbm=count, host=0) if device_type == "cuda" else StorageBytes(0, count)

    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        # Arithmetic dominates. It takes about six times as long as reading a row on a GPU, and a
        # hundred times on a CPU, where a value of a row takes about a thousand operations.
        return hbm_bw / 6 if device_type == "cuda" else host_bw / 100

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        return tt_work(shape_of(shard), load, device_type)

    def calibration_cases(self, device_type: str) -> list[CalibrationCase]:
        return tt_cases(TTOptions, device_type)

    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        return state_of(shard, optimizer)

    def create_lookup(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> TTLookup:
        for shard in shards:
            self.check(shard, optimizer, device.type)
        return TTLookup(shards, feature_tables, optimizer, device)
