"""Caches of hot rows for a group of Tensor-Train tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchrec_hkv.hash_table import Optimizer
from torchrec_hkv.hash_table.table_memory import table_memory
from torchrec_hkv.tensor_train import TTGroup, TTShape
from torchrec_hkv.tensor_train.hot_row_lookup import ColdLookup, lookup_with_hot_rows
from torchrec_hkv.tensor_train.hot_rows import HotRows
from torchrec_hkv.tensor_train.replicas import Replicas

#: Prefix of the names of a cache's tensors in a table's state.
PREFIX = "tt_cache_"
_INT64 = ("ids", "step", "total", "populates", "counted", "counts")
#: Name of the number of training forwards since the cached rows were selected.
_FORWARDS = f"{PREFIX}forwards"


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Size of the cache of one table.

    Attributes:
        rows: number of rows that are cached decompressed.
        counted_ids: number of ids whose frequencies are counted.
        populate_every: number of training forwards between two selections of the cached rows.
            None: they are only selected on request.
    """

    rows: int
    counted_ids: int
    populate_every: int | None

    def num_bytes(self, shape: TTShape, optimizer: Optimizer | None) -> int:
        """Bytes of rows, states, index, frequency counts and the gradient of an update."""
        dim = shape.embedding_dim
        a_row = 4 * dim + 8  # and its id
        if optimizer is not None:
            a_row += 4 * optimizer.state_width(dim) + 4 * dim + 1
        counts = table_memory(self.counted_ids, 1, 0, "lfu")
        return self.rows * a_row + counts.bytes

    def state_shapes(
        self, shape: TTShape, optimizer: Optimizer | None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of :meth:`TTCaches.state`, by name."""
        dim = shape.embedding_dim
        sizes: dict[str, tuple[int, ...]] = {
            "ids": (self.rows,), "rows": (self.rows, dim), "step": (1,), "total": (1,),
            "populates": (1,),
            "counted": (self.counted_ids,), "counts": (self.counted_ids,),
        }  # fmt: skip
        if width := 0 if optimizer is None else optimizer.state_width(dim):
            sizes["states"] = (self.rows, width)
        shapes = {
            f"{PREFIX}{name}": (size, torch.int64 if name in _INT64 else torch.float32)
            for name, size in sizes.items()
        }
        return {**shapes, _FORWARDS: ((1,), torch.int64)}


class TTCaches(nn.Module):
    """The caches of those tables of a group that have one.

    Args:
        group: the group of the tables.
        sizes: size of the cache, by table index.
        device: device of the cached rows.
    """

    def __init__(
        self, group: TTGroup, sizes: Mapping[int, CacheSize], device: torch.device
    ) -> None:
        super().__init__()
        self._group, self._sizes = group, dict(sizes)
        self._modules_by_table = nn.ModuleDict()
        for table, size in sizes.items():
            rows = HotRows(
                group.shapes[table], size.rows, size.counted_ids, group.optimizer, device
            )
            rows.rows.requires_grad_(False)  # trained by the fused optimizer, or not at all
            self._modules_by_table[str(table)] = rows
        self._forwards = dict.fromkeys(sizes, 0)

    @property
    def by_table(self) -> dict[int, HotRows]:
        """The caches by table index."""
        return {int(table): rows for table, rows in self._modules_by_table.items()}

    def replicate(self, replicas: Replicas) -> None:
        """Makes the caches replicas of those of other ranks."""
        for rows in self.by_table.values():
            rows.replicas = replicas

    def before_training(
        self, cores: Sequence[Tensor], ids: Tensor, offsets: Tensor, batch_size: int
    ) -> None:
        """Selects the cached rows again if due, and counts the ids of a batch.

        Args:
            cores: cores of all tables; evicted rows are written back into them.
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[features * batch_size + 1]``.
            batch_size: number of bags of each feature.
        """
        bounds = offsets[::batch_size].tolist() if batch_size else []
        for table, rows in self.by_table.items():
            if self._forwards[table] == self._sizes[table].populate_every:
                self._populate(table, cores)
            self._forwards[table] += 1
            for feature, of in enumerate(self._group.feature_tables):
                if of == table and bounds:
                    rows.count(ids[bounds[feature] : bounds[feature + 1]])

    def populate(self, cores: Sequence[Tensor]) -> None:
        """Selects the rows of all caches again."""
        for table in self._sizes:
            self._populate(table, cores)

    def _populate(self, table: int, cores: Sequence[Tensor]) -> None:
        self.by_table[table].populate(list(cores[self._group.cores_of(table)]))
        self._forwards[table] = 0

    def lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        weights: Tensor | None,
        mean: bool,
        learning_rate: Tensor,
        cold: ColdLookup,
    ) -> Tensor:
        """See :func:`torchrec_hkv.tensor_train.hot_row_lookup.lookup_with_hot_rows`."""
        tables, shapes = self._group.feature_tables, self._group.shapes
        return lookup_with_hot_rows(
            self.by_table,
            tables,
            [shapes[table].embedding_dim for table in tables],
            ids,
            offsets,
            batch_size,
            weights,
            mean,
            learning_rate,
            cold,
        )

    def state(self, table: int) -> dict[str, Tensor]:
        """A copy of a table's cache, by name in the table's state; empty if it has no cache."""
        if table not in self._sizes:
            return {}
        state = self.by_table[table].sized_state()
        forwards = torch.tensor([self._forwards[table]])
        return {**{f"{PREFIX}{name}": t for name, t in state.items()}, _FORWARDS: forwards}

    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        """Loads a result of :meth:`state`. Optimizer states may be missing if there are none."""
        if table not in self._sizes:
            return
        rows = self.by_table[table]
        parts = {name: state.get(f"{PREFIX}{name}") for name in (*_INT64, "rows", "states")}
        if parts["states"] is None:
            parts["states"] = rows.states
        rows.load_sized_state(parts)
        self._forwards[table] = int(state[_FORWARDS])
