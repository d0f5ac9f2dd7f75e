"""Lookup of a group of hash tables on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.backends.hkv.dense import DenseRows
from torchrec_hkv.backends.hkv.files import HashTablesLoad, save_table
from torchrec_hkv.backends.hkv.replicas import HashTablesSync
from torchrec_hkv.backends.hkv.rows import RowsById
from torchrec_hkv.backends.hkv.state import HEAD, StateLoad, export_state, saved_clock
from torchrec_hkv.backends.hkv.table import initializer_of, options_of, state_of, table_spec
from torchrec_hkv.backends.optimizers import hash_table_optimizer
from torchrec_hkv.backends.protocol import (
    DeviceCounters,
    GroupLookup,
    OptimizerSpec,
    StorageBytes,
    TableShard,
)
from torchrec_hkv.backends.save_types import FileOptions, SavedShard
from torchrec_hkv.hash_table import TableGroup, files
from torchrec_hkv.hash_table.files.changes import ChangeTracker
from torchrec_hkv.hash_table.files.digest import table_digest
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.groups.counters import DEVICE_COUNTS
from torchrec_hkv.hash_table.replicas import GroupSync, Wire


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
            [table_spec(shard, optimizer) for shard in shards],
            feature_tables,
            optimizer=hash_table_optimizer(optimizer),
            device=device,
            labels=[shard.label for shard in shards],
        )
        self._dense = {
            shard.key: self._dense_rows(index, shard, feature_tables)
            for index, shard in enumerate(shards)
            if options_of(shard).dense
        }
        first: dict[str, DenseRows] = {}
        for key, rows in self._dense.items():
            if (other := first.setdefault(self._shards[key].name, rows)) is not rows:
                rows.share_step(other)
        # Makes autograd record the lookup. It is not a parameter, because it never changes.
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
            seed=options_of(shard).seed,
            initializer=initializer_of(shard),
            num_features=len(feature_tables),
        )

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        learning_rate: Tensor,
        *,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of each bag, see :meth:`GroupLookup.forward`.

        Args:
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``.
            weights: float32 ``[n]`` or None.
            batch_size: number of bags of each feature.
            learning_rate: float32 ``[]`` on the tables' device.
            scores: int64 ``[n]``. Training lookups need them if a table has the eviction policy
                ``"customized"``.
        """
        return self._pooled_lookup(ids, offsets, weights, batch_size, None, learning_rate, scores)

    def forward_ragged(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bags: Sequence[int],
        dims: Sequence[int],
        learning_rate: Tensor,
        *,
        scores: Tensor | None = None,
    ) -> Tensor:
        return self._pooled_lookup(ids, offsets, weights, 0, bags, learning_rate, scores)

    def _pooled_lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        bags: Sequence[int] | None,
        learning_rate: Tensor,
        scores: Tensor | None,
    ) -> Tensor:
        group, mean, dtype = self._group, self._mean, self._output_dtype
        for rows in self._dense.values():
            rows.flush()
        if self.is_training_lookup:
            batch = (ids, offsets, weights, batch_size)
            return group.train_lookup(
                self._anchor, *batch, mean, learning_rate, bags, dtype, scores
            )
        slots = group.find(ids, offsets, batch_size, bags)
        where = (ids, offsets, weights, slots, batch_size, mean, None)
        return group.pooled_lookup(self._no_anchor, *where, learning_rate, bags, dtype)

    def set_epoch(self, epoch: int) -> None:
        self._group.set_epoch(epoch)

    def epoch(self) -> int:
        return self._group.epoch

    def set_output_dtype(self, dtype: torch.dtype) -> None:
        self._output_dtype = dtype

    def accumulate(self) -> AbstractContextManager[None]:
        return self._group.accumulate()

    def has_open_lookup(self) -> bool:
        return self._group.first_open_step <= self._group.clock

    def unchanged(self) -> AbstractContextManager[None]:
        return self._group.unchanged()

    def replica_sync(self, process_group: dist.ProcessGroup) -> HashTablesSync:
        by_id = [index for key, index in self._index.items() if key not in self._dense]
        syncs = [GroupSync(self._group, by_id, Wire(process_group))] if by_id else []
        return HashTablesSync(syncs, list(self._dense.values()), process_group)

    def dense_states(self, key: str) -> dict[str, Tensor]:
        return self._dense[key].read(states=True)

    def export_table(self, key: str) -> dict[str, Tensor]:
        if key in self._dense:
            return self._dense[key].read(states=False)
        spec = state_of(self._shards[key], self._optimizer)
        return export_state(self._group, self._index[key], self._shards[key], spec)

    def load_table(self, key: str, state: Mapping[str, Tensor]) -> None:
        if key in self._dense:
            self._dense[key].read(states=False)["weight"].copy_(state["weight"])
            return
        spec = state_of(self._shards[key], self._optimizer)
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
        # The loads only move the clock forward, because tables that were not loaded share it. If
        # all tables were loaded, set it to the saved clock, so that no id ages by the load.
        if set(table_states) == set(self._shards):
            self._group.set_clock(max(saved_clock(state) for state in table_states.values()))

    def save_files(self, key: str, folder: Path, options: FileOptions) -> None:
        save_table(self._group, self._index[key], folder, options)

    def saved_bytes(self, key: str) -> int:
        return files.saved_bytes(self._group, self._index[key])

    def change_tracker(self, key: str) -> ChangeTracker:
        return ChangeTracker(self._group, self._index[key])

    def save_changes(
        self, key: str, folder: Path, options: FileOptions, tracker: ChangeTracker
    ) -> None:
        save_table(self._group, self._index[key], folder, options, tracker)

    def digest(self, key: str) -> tuple[int, int]:
        return table_digest(self._group, self._index[key])

    def is_untouched(self) -> bool:
        group = self._group
        return group.clock == 0 and not any(group.sizes()) and not group.optimizer_steps.any()

    def open_files(
        self,
        saved: Mapping[str, tuple[Sequence[SavedShard], tuple[int, int]]],
        options: FileOptions,
    ) -> HashTablesLoad:
        features = list(self._feature_tables)
        indexed = {
            self._index[key]: (
                key,
                self._shards[key].num_embeddings,
                features.index(self._index[key]),
                shards,
                owners,
            )
            for key, (shards, owners) in saved.items()
        }
        return HashTablesLoad(self._group, indexed, options)

    def counters(self, key: str) -> dict[str, int]:
        """See :meth:`torchrec_hkv.hash_table.TableGroup.counters`."""
        return self._group.counters()[self._index[key]]

    def reserve(self, key: str, rows: int) -> None:
        """Grows a table now, so that ``rows`` rows in all fit on this rank without further growth.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity on this rank.
        """
        self._group.reserve(self._index[key], rows)

    def device_counters(self) -> DeviceCounters:
        return DeviceCounters(list(self._index), DEVICE_COUNTS, self._group.device_counters())

    def capacity(self, key: str) -> int:
        return self._group.full_slots(self._index[key])

    def memory(self, key: str) -> StorageBytes:
        """Bytes that the table takes on this rank."""
        index = self._index[key]
        return StorageBytes(self._group.hbm_bytes(index), self._group.host_bytes(index))
