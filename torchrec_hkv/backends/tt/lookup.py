"""Lookup of a group of Tensor-Train tables on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.backends.protocol import (
    CachedLookup,
    GroupLookup,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.row_numbers import collect_rows
from torchrec_hkv.backends.tt.caches import PREFIX, TTCaches
from torchrec_hkv.backends.tt.replicas import CoresSync
from torchrec_hkv.backends.tt.table import (
    head_bytes,
    initial_cores_of,
    optimizer_of,
    options_of,
    shape_of,
    state_of,
)
from torchrec_hkv.tensor_train import TTGroup, rows_of, tt_svd
from torchrec_hkv.tensor_train.hot_rows import HotRows
from torchrec_hkv.tensor_train.replicas import Replicas, replicated_lookup

#: Version of the state tensors, stored in ``"tt_shape"``.
_FORMAT = 1


class TTLookup(CachedLookup, GroupLookup):
    """A group of Tensor-Train tables on one rank."""

    def __init__(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._shards = {shard.name: shard for shard in shards}
        self._index = {shard.name: table for table, shard in enumerate(shards)}
        self._optimizer = optimizer
        self._mean = shards[0].pooling == "mean"
        self._group = TTGroup(
            [shape_of(shard) for shard in shards],
            feature_tables,
            optimizer_of(optimizer),
            [shard.label for shard in shards],
            "tf32" if all(options_of(s).precision == "tf32" for s in shards) else "fp32",
            any(options_of(s).strict for s in shards),
        )
        # Plain tensors, not parameters: the sharded module exports them by table.
        self._cores = [core for shard in shards for core in initial_cores_of(shard, device)]
        self._states = self._group.make_states(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._lookup_counts = torch.zeros(len(shards), dtype=torch.int64, device=device)
        self._feature_tables = torch.tensor(list(feature_tables), device=device)
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._replicas: Replicas | None = None
        caches = {table: options_of(shard).cache for table, shard in enumerate(shards)}
        sizes = {table: cache for table, cache in caches.items() if cache is not None}
        self._caches = TTCaches(self._group, sizes, device) if sizes else None

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        self._replicas = Replicas(process_group)
        if self._caches is not None:
            self._caches.replicate(self._replicas)

    def replica_sync(self, process_group: dist.ProcessGroup) -> CoresSync:
        return CoresSync(self._cores, [*self._states, self._step], process_group)

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        learning_rate: Tensor,
    ) -> Tensor:
        if self.is_training_lookup and batch_size > 0:
            self._lookup_counts.index_add_(0, self._feature_tables, offsets[::batch_size].diff())
        if self._caches is None:
            return self._by_cores(ids, offsets, weights, batch_size, self._mean, learning_rate)
        if ids.device.type == "cpu":
            # Checks ids before the caches count them.
            self._group.sort(ids, offsets, batch_size)
        elif self._group.strict:
            self._group.refuse_outside(ids, offsets, batch_size)
        if self.is_training_lookup:
            self._caches.before_training(self._cores, ids, offsets, batch_size)
        return self._caches.lookup(
            ids,
            offsets,
            batch_size,
            weights,
            self._mean,
            learning_rate,
            lambda ids, offsets, weights: self._by_cores(
                ids, offsets, weights, batch_size, False, learning_rate
            ),
        )

    def _by_cores(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        mean: bool,
        learning_rate: Tensor,
    ) -> Tensor:
        """Lookup of the ids that are not in a cache."""
        kind = {"weights": weights, "mean": mean}
        if not self.is_training_lookup:
            return self._group.lookup(self._cores, ids, offsets, batch_size, **kind)
        kind["index"] = self._group.sort(ids, offsets, batch_size, **kind)
        if self._group.optimizer is None:
            out = self._group.lookup(self._cores, ids, offsets, batch_size, **kind)
            return out + self._anchor.sum()
        tables = (self._anchor, self._cores, self._states, self._step)
        batch = (ids, offsets, batch_size, learning_rate)
        if self._replicas is None:
            return self._group.lookup_fused(*tables, *batch, **kind)
        return replicated_lookup(self._group, *tables, *batch, self._replicas, **kind)

    def populate_caches(self) -> int:
        if self._caches is None:
            return 0
        self._caches.populate(self._cores)
        return len(self._caches.by_table)

    def export_table(self, name: str) -> dict[str, Tensor]:
        tensors = self._tensors(name)
        return {key: tensors[key].detach().clone() for key in self._spec(name)}

    def load_table(self, name: str, state: Mapping[str, Tensor]) -> None:
        tensors = self._tensors(name)
        for key, spec in self._spec(name).items():
            if key not in state:
                raise ValueError(f"table '{name}': the state to load lacks {key!r}.")
            if tuple(state[key].shape) != spec.shape or state[key].dtype != spec.dtype:
                raise ValueError(
                    f"table '{name}': in the state to load {key!r} has shape "
                    f"{tuple(state[key].shape)} and dtype {state[key].dtype}, but the table has "
                    f"{spec.shape} and {spec.dtype}."
                )
        if state["tt_shape"].tolist() != tensors["tt_shape"].tolist():
            raise ValueError(
                f"table '{name}': the state to load has the shape {state['tt_shape'].tolist()} "
                "(format, rows, cores, factors of rows and columns, ranks), but the table has "
                f"{tensors['tt_shape'].tolist()}."
            )
        for key in self._spec(name):
            if not key.startswith(PREFIX):
                tensors[key].copy_(state[key])
        if self._caches is not None:
            self._caches.load(self._index[name], state)

    def _spec(self, name: str) -> dict[str, TensorSpec]:
        return state_of(self._shards[name], self._optimizer)

    def ids(self, name: str, batch: int) -> Iterator[Tensor]:
        return iter(torch.arange(self._shards[name].num_embeddings).split(batch))

    def rows_of(self, name: str, ids: Tensor) -> Tensor:
        shape, cores = self._group.shapes[self._index[name]], self.cores(name)
        ids = ids.to(cores[0].device)
        rows = rows_of(shape, cores, ids)
        if (hot := self._hot_rows_of(name)) is not None:
            places, found = hot.find_uncounted(ids)
            rows[found] = hot.rows.detach()[places[found]].to(rows.dtype)
        return rows.cpu()

    def put_rows(
        self, name: str, batches: Iterable[tuple[Tensor, Tensor]], owners: tuple[int, int]
    ) -> int:
        """Replaces the cores by cores of the same ranks that approximate the rows (TT-SVD). All
        rows of the table must be given."""
        shape, cores = self._group.shapes[self._index[name]], self.cores(name)
        dense = collect_rows(name, shape.num_embeddings, shape.embedding_dim, batches)
        decomposition = tt_svd(dense.to(cores[0].device), ranks=shape.ranks, p=shape.p, q=shape.q)
        for target, core in zip(cores, decomposition.cores, strict=True):
            target.copy_(core)
        for state in self._states[self._group.cores_of(self._index[name])]:
            state.zero_()
        if (hot := self._hot_rows_of(name)) is not None:
            hot.clear()  # its rows are outdated
        return 0

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a table's state and ``optimizer_step``; caches are copied."""
        table = self._index[name]
        shape, cores = self._group.shapes[table], self._group.cores_of(table)
        tensors = {f"tt_core_{k}": core for k, core in enumerate(self._cores[cores])}
        tensors |= {f"tt_state_{k}": state for k, state in enumerate(self._states[cores])}
        tensors["tt_shape"] = torch.tensor([_FORMAT, *shape.packed()])
        tensors["optimizer_step"] = self._step
        return tensors if self._caches is None else {**tensors, **self._caches.state(table)}

    def counters(self, name: str) -> dict[str, int]:
        """Counters of a table: ``lookups`` in training, ``size`` and ``capacity`` (both its number
        of rows), and with a cache ``hits``, the lookups that found their row in the cache."""
        rows, table = self._shards[name].num_embeddings, self._index[name]
        counts = {"lookups": int(self._lookup_counts[table]), "size": rows, "capacity": rows}
        if self._caches is not None and table in self._caches.by_table:
            counts["hits"] = int(self._caches.by_table[table].training_hits)
        return counts

    def hot_rows(self, name: str) -> HotRows:
        """The cache of a table.

        Raises:
            ValueError: the table has no cache.
        """
        hot = self._hot_rows_of(name)
        if hot is None:
            raise ValueError(f"table '{name}' has no cache: give its TTOptions a cache_size.")
        return hot

    def _hot_rows_of(self, name: str) -> HotRows | None:
        return None if self._caches is None else self._caches.by_table.get(self._index[name])

    def memory(self, name: str) -> StorageBytes:
        """Bytes of cores, optimizer states, the float32 gradient of all cores, the cache, and on a
        GPU the products of the first two of four cores."""
        cores = self._group.cores_of(self._index[name])
        tensors = [*self._cores[cores], *self._states[cores]]
        count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        on_gpu = tensors[0].device.type == "cuda"
        if on_gpu or self._group.optimizer is not None:
            count += 4 * sum(core.numel() for core in self._cores[cores])
        if on_gpu:
            count += head_bytes(self._group.shapes[self._index[name]])
        if (cache := options_of(self._shards[name]).cache) is not None:
            count += cache.num_bytes(self._group.shapes[self._index[name]], self._group.optimizer)
        return StorageBytes(count, 0) if on_gpu else StorageBytes(0, count)

    def cores(self, name: str) -> list[Tensor]:
        """The cores of a table; not a copy."""
        return self._cores[self._group.cores_of(self._index[name])]
