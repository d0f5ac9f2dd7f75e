"""Tables that are looked up and trained in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.hash_table.initializers import Initializer, op_arguments
from torchrec_hkv.hash_table.table_memory import hbm_slots_for, table_memory

_ops = torch.ops.torchrec_hkv
_OPTIMIZERS = {
    None: _C.Optimizer.NONE,
    "sgd": _C.Optimizer.SGD,
    "rowwise_adagrad": _C.Optimizer.ROWWISE_ADAGRAD,
}
_EVICTIONS = {
    "lru": _C.Eviction.LRU,
    "lfu": _C.Eviction.LFU,
    "epoch_lru": _C.Eviction.EPOCH_LRU,
    "epoch_lfu": _C.Eviction.EPOCH_LFU,
    "customized": _C.Eviction.CUSTOMIZED,
}
_ROW_TYPES = {
    torch.float32: _C.RowType.FLOAT32,
    torch.float16: _C.RowType.FLOAT16,
    torch.bfloat16: _C.RowType.BFLOAT16,
}
_SIGN_BIT = -(1 << 63)
_COUNTERS = ("lookups", "misses", "inserted", "evicted", "refused")


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One table of a group.

    Attributes:
        name: mixed into the seed of its initial rows.
        capacity: rows it must hold, at least 1.
        dim: columns of its rows, 1 to 2048.
        eviction: which id leaves a full bucket: ``"lru"``, ``"lfu"``, ``"epoch_lru"``,
            ``"epoch_lfu"`` or ``"customized"``; :class:`torchrec_hkv.hash_table.HashTable` says
            what their scores are.
        hbm_bytes: what it may take of a GPU's memory, index included; rows that find no room there
            lie in pinned host memory. None: all in HBM. On a CPU the table is in host memory.
        seed: of the initial rows.
        initializer: distribution of the values of initial rows. None: zeros.
        column_offset: first column, where a table's columns are sharded.
        dtype: of rows: float32, float16 or bfloat16.
        initial_capacity: rows it must hold at first, 1 to ``capacity``; it doubles before it gets
            too full, until it has all its capacity. Rounded up, to 16 buckets of 64 rows if need
            be, since the final number of buckets is a power of two times that at first. None: all
            from the start.
    """

    name: str
    capacity: int
    dim: int
    eviction: Literal["lru", "lfu", "epoch_lru", "epoch_lfu", "customized"] = "lru"
    hbm_bytes: int | None = None
    seed: int = 0
    initializer: Initializer | None = None
    column_offset: int = 0
    dtype: torch.dtype = torch.float32
    initial_capacity: int | None = None


@dataclasses.dataclass(frozen=True)
class TableState:
    """All that a table holds, by slot; zeros in free slots, and in those that it has yet to get.

    The first dimension ``num_slots`` is that of the full capacity.

    Attributes:
        occupied: bool.
        ids: int64.
        rows: ``[num_slots, dim]`` of the table's dtype.
        states: float32 ``[num_slots, state width]``.
        last_steps: int32, the step of each id's last training lookup.
        scores: int64, bits of an unsigned number; empty (``[0]``) under LRU.
    """

    occupied: Tensor
    ids: Tensor
    rows: Tensor
    states: Tensor
    last_steps: Tensor
    scores: Tensor


class TableGroup:
    """Hash tables of any dims and capacities behind one lookup.

    Args:
        tables: the tables.
        feature_tables: for each feature, in the order of the output's columns, its table's index.
        optimizer: ``"sgd"``, ``"rowwise_adagrad"`` or None for tables that are not trained.
        eps: of row-wise Adagrad.
        device: a CPU or CUDA device.
        state_dim: float32 values of state a row keeps; by default what the optimizer needs.

    Raises:
        ValueError: an argument is impossible; the sentence names it.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        feature_tables: Sequence[int],
        optimizer: Literal["sgd", "rowwise_adagrad"] | None = None,
        eps: float = 1e-8,
        device: torch.device | str = "cpu",
        state_dim: int | None = None,
    ) -> None:
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer is {optimizer!r}, but must be one of {list(_OPTIMIZERS)}.")
        self.tables = tuple(tables)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        on_gpu = self.device.type == "cuda" and _C.has_cuda
        available = (*(gpu_memory(self.device) if on_gpu else (0, 0)), *host_memory())
        kind = _OPTIMIZERS[optimizer]
        width = _C.state_width(kind) if state_dim is None else state_dim
        configs = [self._config(spec, width) for spec in self.tables]
        self._group = _C.TableGroup(
            configs, list(feature_tables), kind, eps, state_dim, self.device, available
        )

    def _config(self, spec: TableSpec, state_dim: int) -> _C.TableConfig:
        if spec.eviction not in _EVICTIONS:
            raise ValueError(
                f"table '{spec.name}': eviction is {spec.eviction!r}, but must be one of "
                f"{', '.join(map(repr, _EVICTIONS))}."
            )
        if spec.dtype not in _ROW_TYPES:
            raise ValueError(
                f"table '{spec.name}': dtype is {spec.dtype}, but must be one of "
                f"{', '.join(map(str, _ROW_TYPES))}."
            )
        memory = table_memory(
            spec.capacity,
            spec.dim,
            state_dim,
            spec.eviction,
            spec.dtype.itemsize,
            spec.initial_capacity,
        )
        if spec.hbm_bytes is not None and spec.hbm_bytes < memory.least_hbm_bytes:
            raise ValueError(
                f"table '{spec.name}': hbm_bytes is {spec.hbm_bytes}, but {spec.capacity} rows "
                f"need at least {memory.least_hbm_bytes}: their index, and one bucket with its "
                "rows."
            )
        hbm_bytes = spec.hbm_bytes if self.device.type == "cuda" else None
        initial = spec.capacity if spec.initial_capacity is None else spec.initial_capacity
        return _C.TableConfig(
            name=spec.name,
            capacity=spec.capacity,
            initial_capacity=initial,
            dim=spec.dim,
            column_offset=spec.column_offset,
            eviction=_EVICTIONS[spec.eviction],
            row_type=_ROW_TYPES[spec.dtype],
            seed=table_seed(spec.seed, spec.name),
            hbm_slots=hbm_slots_for(memory, hbm_bytes),
            **op_arguments(spec.initializer),
        )

    @property
    def handle(self) -> int:
        """The number that names this group in ops."""
        return self._group.handle

    @property
    def total_dim(self) -> int:
        """Columns of all features."""
        return self._group.total_dim

    @property
    def num_slots(self) -> int:
        """Slots of all tables at their full capacities; slot numbers are below this."""
        return self._group.num_slots

    def present_slots(self, table: int) -> int:
        """Slots that a table has at present; it grows up to its capacity."""
        return self._group.present_slots(table)

    def full_slots(self, table: int) -> int:
        """Slots of a table at its full capacity."""
        return self._group.full_slots(table)

    def reserve(self, table: int, rows: int) -> None:
        """Grows a table now, so that it takes ``rows`` rows in all without growing.

        Slots that were found before are not valid any more, but those of lookups whose backward is
        to come are found again. Waits for the device.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity.
            RuntimeError: there is too little memory, or a CUDA graph is being captured; nothing has
                changed.
        """
        self._group.reserve(table, rows)

    def reserve_buckets(self, table: int, num_buckets: int, bucket_slots: int) -> bool:
        """Grows a table to this geometry; False, and nothing is done, where it can't have it."""
        return self._group.reserve_buckets(table, num_buckets, bucket_slots)

    @property
    def counter_tensor(self) -> Tensor:
        """int64 ``[tables, 5]`` on the device; ops that change a table write it."""
        return self._group.counters

    @property
    def clock(self) -> int:
        """The last step begun."""
        return self._group.clock

    def set_clock(self, clock: int) -> None:
        """Sets the last step begun, before contents of that time are loaded.

        Raises:
            ValueError: it is out of range, or the backward of a lookup is still to come.
        """
        self._group.set_clock(clock)

    def begin_step(self) -> int:
        """The number of a new training step, to pass to :meth:`find_or_insert`."""
        return self._group.begin_step()

    def find(self, ids: Tensor, offsets: Tensor | None, batch_size: int) -> Tensor:
        """Slots of ids, -1 where a table has no such id. Changes nothing.

        Args:
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``; None for one bag of all
                ids, where the group has one feature.
            batch_size: bags a feature.

        Returns:
            int64 ``[n]``, slots numbered through the group's tables.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a length or device is not as above; on a CPU also offsets that decrease or
                do not end with ``n``.
        """
        return _ops.find(self.handle, ids, offsets, batch_size)

    def find_or_insert(self, ids: Tensor, offsets: Tensor, batch_size: int, step: int) -> Tensor:
        """As :meth:`find`, and inserts missing ids with their initial rows.

        A table that has not its full capacity yet may grow before (and then waits for the device).
        An id finds no place, and gets -1, where both of its buckets are full of ids that were
        looked up in this step or in one whose backward is still to come.
        """
        counters = self._group.counters
        return _ops.find_or_insert(counters, self.handle, ids, offsets, batch_size, step)

    def pooled_lookup(
        self,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        slots: Tensor,
        batch_size: int,
        mean: bool,
        step: int,
        learning_rate: float,
    ) -> Tensor:
        """Reduced rows of each bag; the backward updates the rows.

        Args:
            anchor: a tensor that requires grad where the lookup is to be trained.
            ids: as in :meth:`find`.
            offsets: as in :meth:`find`.
            weights: float32 ``[n]`` or None.
            slots: of :meth:`find` or :meth:`find_or_insert`; an id without one counts with its
                initial row and is not trained.
            batch_size: as in :meth:`find`.
            mean: divide by the number of ids in the bag.
            step: the step of :meth:`find_or_insert`; 0 in evaluation, where nothing is trained.
            learning_rate: of the backward.

        Returns:
            float32 ``[batch_size, total_dim]``.
        """
        return _ops.pooled_lookup(
            anchor,
            self.handle,
            ids,
            offsets,
            weights,
            slots,
            batch_size,
            mean,
            step,
            learning_rate,
        )

    def export_table(self, table: int) -> TableState:
        """A copy of all that a table holds."""
        state = self._group.export_table(table)
        fields = [field.name for field in dataclasses.fields(TableState)]
        return TableState(**{name: getattr(state, name) for name in fields})

    def load_table(self, table: int, state: TableState) -> None:
        """Replaces all that a table holds by an exported state of a table of the same capacity.

        The state may be of a table that has grown more or less far. This one grows as far; it does
        not shrink.

        Raises:
            ValueError: a tensor has another shape or dtype, or an id stands where the table would
                not find it; nothing has changed then.
        """
        loaded = _C.TableState()
        for field in dataclasses.fields(TableState):
            setattr(loaded, field.name, getattr(state, field.name))
        self._group.load_table(table, loaded)

    def clear_table(self, table: int) -> None:
        """Forgets all ids of a table. Counters go on."""
        self._group.clear_table(table)

    def sizes(self) -> list[int]:
        """Entries of each table (waits for the device)."""
        return self._group.sizes().tolist()

    def select_slots(
        self,
        table: int,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
    ) -> Tensor:
        """Slots of the entries that meet every given condition (waits for the device).

        Args:
            table: index of the table.
            score_below: unsigned score less than this.
            score_at_least: unsigned score not less than this.
            older_than: last touched more than this many steps before the last step begun.

        Returns:
            int64, ascending, counted from the table's first slot.

        Raises:
            ValueError: a bound is no unsigned 64-bit number, or an age is negative.
        """
        for what, bound in (("score_below", score_below), ("score_at_least", score_at_least)):
            if bound is not None and not 0 <= bound < 1 << 64:
                raise ValueError(f"{what} is {bound}, but must be from 0 to 2^64 - 1.")
        if older_than is not None and older_than < 0:
            raise ValueError(f"older_than is {older_than}, but must not be negative.")
        chosen = self._group.occupied(table)
        if score_below is not None or score_at_least is not None:
            # Flipping the sign bit orders unsigned numbers as int64 orders them.
            scores = self._group.scores(table) ^ _SIGN_BIT
            if score_below is not None:
                chosen &= scores < score_below + _SIGN_BIT
            if score_at_least is not None:
                chosen &= scores >= score_at_least + _SIGN_BIT
        if older_than is not None:
            chosen &= self._group.last_steps(table) < self._group.clock - older_than
        return chosen.nonzero().flatten()

    def counters(self) -> list[dict[str, int]]:
        """For each table, counts since it was made, its size and its full capacity in slots.

        Waits for the device.
        """
        counts = self._group.counters.tolist()
        sizes = self._group.sizes().tolist()
        result = []
        for table, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            counted = dict(zip(_COUNTERS, count, strict=True))
            counted["hits"] = counted["lookups"] - counted.pop("misses")
            result.append({**counted, "size": size, "capacity": self._group.full_slots(table)})
        return result

    def hbm_bytes(self, table: int) -> int:
        """Bytes a table takes of a GPU's memory."""
        return self._group.hbm_bytes(table)

    def host_bytes(self, table: int) -> int:
        """Bytes a table takes of host memory."""
        return self._group.host_bytes(table)
