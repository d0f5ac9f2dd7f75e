"""The backend ``hkv``: a hash table that takes any 64-bit id and evicts when full."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.hkv_cost import hkv_cases, hkv_work
from torchrec_hkv.backends.hkv_dense import DenseRows, dense_capacity
from torchrec_hkv.backends.hkv_files import (
    HashTablesLoad,
    save_table,
    saved_files,
    verify_file,
)
from torchrec_hkv.backends.hkv_optimizer import hash_table_optimizer, state_width
from torchrec_hkv.backends.hkv_options import HKVOptions
from torchrec_hkv.backends.hkv_rows import RowsById
from torchrec_hkv.backends.hkv_state import (
    HEAD,
    StateLoad,
    export_state,
    saved_clock,
    state_spec,
)
from torchrec_hkv.backends.protocol import (
    Backend,
    BackendOptions,
    GroupLookup,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.saved import FileOptions, SavedShard
from torchrec_hkv.backends.workload import Work, Workload
from torchrec_hkv.hash_table import (
    Initializer,
    TableGroup,
    TableMemory,
    TableSpec,
    Uniform,
    gpu_table_bytes,
    table_memory,
)
from torchrec_hkv.hash_table.digest import table_digest
from torchrec_hkv.hash_table.manifest import OWNERS

#: Of rows, and of outputs.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _options(shard: TableShard) -> HKVOptions:
    if not isinstance(shard.options, HKVOptions):
        raise ValueError(
            f"table '{shard.name}': options of type {type(shard.options).__name__} were given to "
            "backend 'hkv', which takes HKVOptions."
        )
    return shard.options


def _initializer(shard: TableShard) -> Initializer:
    if (chosen := _options(shard).initializer) is not None:
        return chosen
    low, high = shard.init_range
    try:
        return Uniform(low, high)
    except ValueError:
        raise ValueError(
            f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, but "
            "both must be finite in float32 and the first must not be larger."
        ) from None


def _memory(shard: TableShard, optimizer: OptimizerSpec | None) -> TableMemory:
    options = _options(shard)
    return table_memory(
        _slots_wanted(shard),
        shard.dim,
        state_width(optimizer, shard.dim),
        options.eviction,
        element_bytes=shard.dtype.itemsize,
        admission=options.admission,
        initial_capacity=_initial_capacity(shard),
        remember_evicted=options.remember_evicted,
    )


def _hbm_bytes(shard: TableShard, optimizer: OptimizerSpec | None) -> int | None:
    told = _options(shard).hbm_bytes
    return _memory(shard, optimizer).least_hbm_bytes if told == "index" else told


def _slots_wanted(shard: TableShard) -> int:
    return dense_capacity(shard.capacity) if _options(shard).dense else shard.capacity


def _initial_capacity(shard: TableShard) -> int | None:
    """The shard's part, rounded up."""
    initial = _options(shard).initial_capacity
    if initial is None:
        return None
    if initial > shard.num_embeddings:
        raise ValueError(
            f"table '{shard.name}': initial_capacity is {initial}, but must not exceed "
            f"num_embeddings, {shard.num_embeddings}."
        )
    return -(-initial * shard.capacity // shard.num_embeddings)


class HKVLookup(RowsById, GroupLookup):
    """A group of hash tables on one rank."""

    def __init__(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._shards = {shard.key: shard for shard in shards}
        self._index = {shard.key: i for i, shard in enumerate(shards)}
        self._feature_tables = tuple(feature_tables)
        self._mean = shards[0].pooling == "mean"
        self._output_dtype = torch.float32
        self._group = TableGroup(
            [_table_spec(shard, optimizer) for shard in shards],
            feature_tables,
            optimizer=hash_table_optimizer(optimizer),
            device=device,
        )
        self._dense = {
            shard.key: self._dense_rows(index, shard, feature_tables)
            for index, shard in enumerate(shards)
            if _options(shard).dense
        }
        # What makes autograd record the lookup; no parameter, since nothing ever changes it.
        self._anchor = torch.empty(0, device=self._group.device, requires_grad=True)
        self._no_anchor = torch.empty(0, device=self._group.device)

    def _dense_rows(
        self, index: int, shard: TableShard, feature_tables: Sequence[int]
    ) -> DenseRows:
        return DenseRows(
            self._group,
            index,
            list(feature_tables).index(index),
            rows=shard.capacity,
            first_row=shard.row_offset,
            column_offset=shard.column_offset,
            name=shard.name,
            seed=_options(shard).seed,
            initializer=_initializer(shard),
            num_features=len(feature_tables),
        )

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        learning_rate: Tensor,
    ) -> Tensor:
        return self._look_up(ids, offsets, weights, batch_size, None, learning_rate)

    def forward_ragged(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bags: Sequence[int],
        dims: Sequence[int],
        learning_rate: Tensor,
    ) -> Tensor:
        return self._look_up(ids, offsets, weights, 0, bags, learning_rate)

    def _look_up(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        bags: Sequence[int] | None,
        learning_rate: Tensor,
    ) -> Tensor:
        group = self._group
        for rows in self._dense.values():
            rows.flush()
        if self.training:
            pin = group.pin()
            slots = group.find_or_insert(ids, offsets, batch_size, pin, bags)
            anchor = self._anchor
        else:
            pin = None
            slots = group.find(ids, offsets, batch_size, bags)
            anchor = self._no_anchor
        where = (ids, offsets, weights, slots, batch_size, self._mean, pin)
        return group.pooled_lookup(anchor, *where, learning_rate, bags, self._output_dtype)

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        self._output_dtype = dtype

    def accumulate(self) -> AbstractContextManager[None]:
        return self._group.accumulate()

    def dense_states(self, key: str) -> dict[str, Tensor]:
        return self._dense[key].read(states=True)

    def export_table(self, key: str) -> dict[str, Tensor]:
        if key in self._dense:
            return self._dense[key].read(states=False)
        spec = HKVBackend.state_of(self._shards[key], self._optimizer)
        return export_state(self._group, self._index[key], self._shards[key], spec)

    def load_table(self, key: str, state: Mapping[str, Tensor]) -> None:
        if key in self._dense:
            self._dense[key].read(states=False)["weight"].copy_(state["weight"])
            return
        spec = HKVBackend.state_of(self._shards[key], self._optimizer)
        missing = sorted({HEAD, *spec} - set(state))
        if missing:
            raise ValueError(
                f"table '{self._shards[key].name}': the state to load lacks {', '.join(missing)}."
            )
        load = self.open_entries(key, (0, OWNERS))
        load.check(state[HEAD])
        load.load_same(state[HEAD], state)

    def open_entries(self, key: str, owners: tuple[int, int]) -> StateLoad:
        return StateLoad(self._group, self._index[key], self._shards[key], owners)

    def entries_loaded(self, table_states: Mapping[str, Tensor]) -> None:
        # The loads have only put the clock forward, for the sake of tables that stay as they are.
        # Where all are others now, it goes back: else the time between would age their ids.
        if set(table_states) == set(self._shards):
            self._group.set_clock(max(saved_clock(state) for state in table_states.values()))

    def save_files(self, key: str, folder: Path, options: FileOptions) -> None:
        save_table(self._group, self._index[key], folder, options)

    def digest(self, key: str) -> tuple[int, int]:
        return table_digest(self._group, self._index[key])

    def open_files(
        self,
        saved: Mapping[str, tuple[Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> HashTablesLoad:
        features = list(self._feature_tables)
        indexed = {
            self._index[key]: (features.index(self._index[key]), shards, owners)
            for key, (shards, owners) in saved.items()
        }
        return HashTablesLoad(self._group, indexed, options)

    def counters(self, key: str) -> dict[str, int]:
        """As :meth:`torchrec_hkv.hash_table.TableGroup.counters` says."""
        return self._group.counters()[self._index[key]]

    def reserve(self, key: str, rows: int) -> None:
        """Grows a table now, so that this rank takes ``rows`` rows in all without growing.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity on this rank.
        """
        self._group.reserve(self._index[key], rows)

    def device_counters(self) -> tuple[Sequence[str], Tensor]:
        return list(self._index), self._group.device_counters()

    def capacity(self, key: str) -> int:
        return self._group.full_slots(self._index[key])

    def memory(self, key: str) -> StorageBytes:
        """Bytes the table takes on this rank."""
        index = self._index[key]
        return StorageBytes(self._group.hbm_bytes(index), self._group.host_bytes(index))


def _table_spec(shard: TableShard, optimizer: OptimizerSpec | None) -> TableSpec:
    options = _options(shard)
    return TableSpec(
        name=shard.name,
        capacity=_slots_wanted(shard),
        dim=shard.dim,
        dtype=shard.dtype,
        eviction=options.eviction,
        hbm_bytes=_hbm_bytes(shard, optimizer),
        seed=options.seed,
        initializer=_initializer(shard),
        column_offset=shard.column_offset,
        admission=options.admission,
        expire_after=options.expire_after,
        strict=options.strict,
        initial_capacity=_initial_capacity(shard),
        remember_evicted=options.remember_evicted,
        deterministic=options.deterministic,
    )


class HKVBackend(Backend):
    """Hash tables as a backend."""

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
    output_dtypes: ClassVar[tuple[torch.dtype, ...]] = _DTYPES
    accumulates: ClassVar[bool] = True

    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        options = _options(shard)
        if shard.capacity < 1 and not options.dense:
            raise ValueError(
                f"table '{shard.name}': num_embeddings is {shard.num_embeddings}, but must be at "
                "least 1 for each rank that the rows are spread over; it is the capacity of the "
                "hash table in rows."
            )
        if not 1 <= shard.dim <= 2048:
            raise ValueError(
                f"table '{shard.name}': embedding_dim is {shard.dim}, but backend 'hkv' takes 1 to "
                "2048."
            )
        if shard.dtype not in _DTYPES:
            raise ValueError(
                f"table '{shard.name}': data type is {shard.dtype}, but backend 'hkv' takes "
                f"{', '.join(map(str, _DTYPES))}."
            )
        try:
            hash_table_optimizer(optimizer)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None
        least = _memory(shard, optimizer).least_hbm_bytes
        hbm_bytes = _hbm_bytes(shard, optimizer)
        if hbm_bytes is not None and hbm_bytes < least:
            raise ValueError(
                f"table '{shard.name}': hbm_bytes is {hbm_bytes}, but {shard.capacity} "
                f"rows on a rank need at least {least}: their index, and one bucket with its rows."
            )
        _initializer(shard)

    def routes_by_hash(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def on_host(self, options: BackendOptions) -> BackendOptions:
        return dataclasses.replace(options, hbm_bytes="index")

    def is_dense(self, options: BackendOptions) -> bool:
        return isinstance(options, HKVOptions) and options.dense

    def identity(self, shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, Any]:
        options = _options(shard)
        return {
            **super().identity(shard, optimizer),
            "eviction": options.eviction,
            "seed": options.seed,
        }

    def exchanges(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def state_geometry(self, shard: TableShard, optimizer: OptimizerSpec | None) -> tuple[int, ...]:
        memory = _memory(shard, optimizer)
        return (memory.num_slots, memory.bucket_slots, memory.initial_slots)

    def saves_files(self, options: BackendOptions) -> bool:
        return not self.is_dense(options)

    def saved_files(self, folder: Path) -> list[str]:
        return saved_files(folder)

    def verify_file(self, folder: Path, file: str, options: FileOptions) -> None:
        verify_file(folder, file, options)

    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        table = self._table_storage(shard, optimizer, device_type)
        if not _options(shard).dense:
            return table
        # Rows and states once more, in the order of row numbers.
        width = shard.dtype.itemsize * shard.dim + 4 * state_width(optimizer, shard.dim)
        shown = shard.capacity * width
        if device_type != "cuda":
            return StorageBytes(hbm=0, host=table.host + shown)
        return StorageBytes(hbm=table.hbm + shown, host=table.host)

    def _table_storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        memory = _memory(shard, optimizer)
        if device_type != "cuda":
            return StorageBytes(hbm=0, host=memory.bytes)
        hbm, host = gpu_table_bytes(memory, _hbm_bytes(shard, optimizer))
        return StorageBytes(hbm=hbm, host=host)

    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        # A lookup reads an id's line of digests and its id besides the row: about half as much
        # again for the rows of 256 to 512 bytes that are usual.
        return (hbm_bw if device_type == "cuda" else host_bw) / 1.5

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        memory = _memory(shard, optimizer)
        hbm_bytes = _hbm_bytes(shard, optimizer)
        return hkv_work(memory, shard.dim, load, hbm_bytes, device_type)

    def calibration_cases(self, device_type: str) -> list[CalibrationCase]:
        return hkv_cases(HKVOptions, device_type)

    @staticmethod
    def state_of(shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, TensorSpec]:
        """As :meth:`state_spec`."""
        if _options(shard).dense:
            return {"weight": TensorSpec((shard.capacity, shard.dim), shard.dtype)}
        slots, options = _memory(shard, optimizer).num_slots, _options(shard)
        keeps_scores = options.eviction == "lfu"
        return state_spec(shard, optimizer, slots, keeps_scores, options.admission)

    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        return self.state_of(shard, optimizer)

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
