"""The hot rows of a group of Tensor-Train tables: which tables have some, when they are chosen."""

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

#: Of a cache in a table's state, before the names of its parts.
PREFIX = "tt_cache_"
_INT64 = ("ids", "step", "total", "populates", "counted", "counts")
#: Training forwards since the rows were chosen, of what this module keeps itself.
_FORWARDS = f"{PREFIX}forwards"


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """The hot rows of one table.

    Attributes:
        rows: kept decompressed.
        counted_ids: ids whose frequencies are known at a time.
        populate_every: training forwards from one choice to the next; None: only when asked.
    """

    rows: int
    counted_ids: int
    populate_every: int | None

    def num_bytes(self, shape: TTShape, optimizer: Optimizer | None) -> int:
        """Rows, states, what finds them, counts of frequencies, and the gradient of an update."""
        dim = shape.embedding_dim
        a_row = 4 * dim + 8  # and its id
        if optimizer is not None:
            a_row += 4 * optimizer.state_width(dim) + 4 * dim + 1
        counts = table_memory(self.counted_ids, 1, 0, "lfu")
        return self.rows * a_row + counts.bytes

    def state_shapes(
        self, shape: TTShape, optimizer: Optimizer | None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of :meth:`TTCaches.state`."""
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
    """The caches of the tables of one group that have one.

    Args:
        group: of the tables.
        sizes: by the index of their table.
        device: of the rows.
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
            rows.rows.requires_grad_(False)  # what trains them is fused, or nothing does
            self._modules_by_table[str(table)] = rows
        self._forwards = dict.fromkeys(sizes, 0)

    @property
    def by_table(self) -> dict[int, HotRows]:
        """The caches by the index of their table."""
        return {int(table): rows for table, rows in self._modules_by_table.items()}

    def replicate(self, replicas: Replicas) -> None:
        """From now on other ranks hold the same tables."""
        for rows in self.by_table.values():
            rows.replicas = replicas

    def before_training(
        self, cores: Sequence[Tensor], ids: Tensor, offsets: Tensor, batch_size: int
    ) -> None:
        """Chooses rows anew where it is time, and counts the ids of a batch.

        Args:
            cores: of all tables; written where rows leave.
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[features * batch_size + 1]``.
            batch_size: bags a feature.
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
        """Chooses the rows of all caches anew."""
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
        """As :func:`torchrec_hkv.tensor_train.hot_row_lookup.lookup_with_hot_rows`."""
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
        """A copy of a table's cache, by name in the table's state; nothing where it has none."""
        if table not in self._sizes:
            return {}
        state = self.by_table[table].sized_state()
        forwards = torch.tensor([self._forwards[table]])
        return {**{f"{PREFIX}{name}": t for name, t in state.items()}, _FORWARDS: forwards}

    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state` gave; states that an optimizer has not may be left out."""
        if table not in self._sizes:
            return
        rows = self.by_table[table]
        parts = {name: state.get(f"{PREFIX}{name}") for name in (*_INT64, "rows", "states")}
        if parts["states"] is None:
            parts["states"] = rows.states
        rows.load_sized_state(parts)
        self._forwards[table] = int(state[_FORWARDS])
