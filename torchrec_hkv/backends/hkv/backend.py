"""The backend ``hkv`` for sharding, planner and checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.hkv.cost import far_share, hkv_cases, hkv_work
from torchrec_hkv.backends.hkv.files import merge_files, saved_folder, verify_file
from torchrec_hkv.backends.hkv.lookup import HKVLookup
from torchrec_hkv.backends.hkv.options import OUTPUT_DTYPES, ROW_DTYPES, HKVOptions
from torchrec_hkv.backends.hkv.table import (
    hbm_bytes_of,
    initializer_of,
    memory_of,
    options_of,
    state_of,
)
from torchrec_hkv.backends.hkv.variants import fewer_rows, kept_quality, tiers
from torchrec_hkv.backends.optimizers import counts_own_steps, hash_table_optimizer, state_width
from torchrec_hkv.backends.protocol import (
    Backend,
    BackendOptions,
    Kept,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.save_types import FileOptions, SavedFolder, SavedShard
from torchrec_hkv.backends.workload import IdFrequencies, Work, Workload
from torchrec_hkv.hash_table import gpu_table_bytes
from torchrec_hkv.hash_table.eviction import can_load_policy, name_of
from torchrec_hkv.hash_table.replicas import id_sync_bytes, swaps


class HKVBackend(Backend):
    """The backend ``hkv``: hash tables."""

    name: ClassVar[str] = "hkv"
    options_type: ClassVar[type[BackendOptions]] = HKVOptions
    sharding_types: ClassVar[tuple[str, ...]] = (
        ShardingType.ROW_WISE.value,
        ShardingType.TABLE_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.TABLE_COLUMN_WISE.value,
        ShardingType.GRID_SHARD.value,
    )
    routing: ClassVar[Literal["hashed", "block"]] = "hashed"
    output_dtypes: ClassVar[tuple[torch.dtype, ...]] = OUTPUT_DTYPES
    accumulates: ClassVar[bool] = True

    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        options = options_of(shard)
        if shard.capacity < 1 and not options.dense:
            size = "num_embeddings" if options.capacity is None else "capacity"
            raise ValueError(
                f"table '{shard.name}': {size} is {shard.num_embeddings}, but must be at least 1 "
                "for each rank that holds rows: it is the capacity of the hash table in rows."
            )
        if not 1 <= shard.dim <= 2048:
            raise ValueError(
                f"table '{shard.name}': embedding_dim is {shard.dim}, but backend 'hkv' takes 1 to "
                "2048."
            )
        if shard.dtype not in ROW_DTYPES:
            raise ValueError(
                f"table '{shard.name}': data type is {shard.dtype}, but backend 'hkv' takes "
                f"{', '.join(map(str, ROW_DTYPES))}."
            )
        if shard.dtype == torch.int8 and shard.dim != shard.embedding_dim:
            raise ValueError(
                f"table '{shard.name}': a shard has {shard.dim} of {shard.embedding_dim} columns, "
                "but a row of torch.int8 can't be split, because its columns share a scale: take "
                "row-wise or table-wise sharding, or torch.bfloat16."
            )
        try:
            hash_table_optimizer(optimizer)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None
        minimum = memory_of(shard, optimizer).least_hbm_bytes
        hbm_bytes = hbm_bytes_of(shard, optimizer)
        if hbm_bytes is not None and hbm_bytes < minimum:
            raise ValueError(
                f"table '{shard.name}': hbm_bytes is {hbm_bytes}, but {shard.capacity} "
                f"rows on a rank need at least {minimum}: their index, and one bucket with its "
                "rows."
            )
        initializer_of(shard)

    def check_replicas(self, shard: TableShard) -> None:
        """Does nothing: replicas of every hash table can be merged."""

    def sync_bytes(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        touched: float,
        touched_anywhere: float,
        replicas: int,
        device_type: str,
    ) -> float:
        options, width = options_of(shard), state_width(optimizer, shard.dim)
        if options.dense:
            return 8 * shard.capacity * (shard.dim + width) * (replicas - 1) / replicas
        return id_sync_bytes(
            touched,
            touched_anywhere,
            shard.dim,
            width,
            options.table_eviction,
            replicas,
            own_steps=counts_own_steps(optimizer),
            swaps=swaps(replicas, device_type),
        )

    def routes_by_hash(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def on_host(self, options: BackendOptions) -> BackendOptions:
        return dataclasses.replace(options, hbm_bytes="index")

    def kept(
        self,
        table: TableShard,
        num_embeddings: int,
        dtype: torch.dtype,
        frequencies: IdFrequencies | None,
    ) -> list[Kept]:
        return kept_quality(table, num_embeddings, dtype, frequencies)

    def variants(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        device_type: str,
        frequencies: IdFrequencies | None,
    ) -> list[HKVOptions]:
        options = options_of(shard)
        found = fewer_rows(options, shard.num_embeddings) if frequencies is not None else []
        if device_type == "cuda" and options.hbm_bytes is None and not options.dense:
            found += tiers(options, memory_of(shard, optimizer))
        return found

    def far_share(
        self, shard: TableShard, optimizer: OptimizerSpec | None, load: Workload, device_type: str
    ) -> float:
        if device_type != "cuda":
            return 0.0
        memory = memory_of(shard, optimizer)
        return far_share(memory, load, hbm_bytes_of(shard, optimizer))

    def is_dense(self, options: BackendOptions) -> bool:
        return isinstance(options, HKVOptions) and options.dense

    def identity(self, shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, Any]:
        options = options_of(shard)
        return {
            **super().identity(shard, optimizer),
            "eviction": name_of(options.table_eviction),
            "seed": options.seed,
        }

    def loads(self, what: str, saved: Any, own: Any) -> bool:
        if what == "optimizer" and saved is None:
            return True  # the states are reset
        return can_load_policy(own, saved) if what == "eviction" else saved == own

    def exchanges(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def state_geometry(self, shard: TableShard, optimizer: OptimizerSpec | None) -> tuple[int, ...]:
        memory = memory_of(shard, optimizer)
        return (memory.num_slots, memory.bucket_slots, memory.initial_slots)

    def saves_files(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def saved_folder(self, folder: Path) -> SavedFolder:
        return saved_folder(folder)

    def merge_files(self, layers: Sequence[Path], folder: Path, options: FileOptions) -> None:
        merge_files(layers, folder, options)

    def verify_file(self, saved: SavedShard, file: str, options: FileOptions) -> None:
        verify_file(saved, file, options)

    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        table = self._table_storage(shard, optimizer, device_type)
        if not options_of(shard).dense:
            return table
        # A second copy of rows and states, in the order of row numbers.
        width = shard.dtype.itemsize * shard.dim + 4 * state_width(optimizer, shard.dim)
        shown = shard.capacity * width
        if device_type != "cuda":
            return StorageBytes(hbm=0, host=table.host + shown)
        return StorageBytes(hbm=table.hbm + shown, host=table.host)

    def _table_storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        memory = memory_of(shard, optimizer)
        if device_type != "cuda":
            return StorageBytes(hbm=0, host=memory.bytes)
        hbm, host = gpu_table_bytes(memory, hbm_bytes_of(shard, optimizer))
        return StorageBytes(hbm=hbm, host=host)

    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        # Besides the row, a lookup reads an id's line of digests and its id: about half as much
        # again for usual rows of 256 to 512 bytes.
        return (hbm_bw if device_type == "cuda" else host_bw) / 1.5

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        memory = memory_of(shard, optimizer)
        hbm_bytes = hbm_bytes_of(shard, optimizer)
        return hkv_work(memory, shard.dim, load, hbm_bytes, device_type)

    def calibration_cases(self, device_type: str) -> list[CalibrationCase]:
        return hkv_cases(HKVOptions, device_type)

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
    ) -> HKVLookup:
        for shard in shards:
            self.check(shard, optimizer, device.type)
        return HKVLookup(shards, feature_tables, optimizer, device)
