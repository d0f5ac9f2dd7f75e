"""Tables that are looked up and trained in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.accumulation import Accumulator
from torchrec_hkv.hash_table.admission import admission_config
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.hash_table.initializers import op_arguments
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.hash_table.spec_checks import (
    check_expire_after,
    check_remember_evicted,
    check_strict,
    crowded_message,
)
from torchrec_hkv.hash_table.table_memory import hbm_slots_for, table_memory
from torchrec_hkv.hash_table.table_spec import TableSpec, TableState

_ops = torch.ops.torchrec_hkv
_EVICTIONS = {
    "lru": _C.Eviction.LRU,
    "lfu": _C.Eviction.LFU,
    "epoch_lru": _C.Eviction.EPOCH_LRU,
    "epoch_lfu": _C.Eviction.EPOCH_LFU,
    "customized": _C.Eviction.CUSTOMIZED,
}
#: What :meth:`TableGroup.device_counters` gives of a table.
DEVICE_COUNTS = ("lookups", "hits", "inserted", "evicted", "refused", "unadmitted")
DEVICE_COUNTS += ("expired", "fetched", "written_home", "host_hits", "returned", "size")
_ROW_TYPES = {
    torch.float32: _C.RowType.FLOAT32,
    torch.float16: _C.RowType.FLOAT16,
    torch.bfloat16: _C.RowType.BFLOAT16,
}
#: Keeps the rows of one training lookup in place until its backward; see :meth:`TableGroup.pin`.
Pin = _C.Pin

_SIGN_BIT = -(1 << 63)
_COUNTERS = (
    "lookups",
    "misses",
    "inserted",
    "evicted",
    "refused",
    "unadmitted",
    "expired",
    "fetched",
    "written_home",
    "crowded",
    "host_hits",
    "returned",
)
#: What strict tables watch.
_CROWDED = _COUNTERS.index("crowded")


class TableGroup:
    """Hash tables of any dims and capacities behind one lookup.

    Args:
        tables: the tables.
        feature_tables: for each feature, in the order of the output's columns, its table's index.
        optimizer: what trains the rows (:mod:`torchrec_hkv.hash_table.optimizers`), or None for
            tables that are not trained.
        device: a CPU or CUDA device.
        state_dim: float32 values of state that a row of every table keeps; by default what the
            optimizer needs.

    Raises:
        ValueError: an argument is impossible; the sentence names it.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        feature_tables: Sequence[int],
        optimizer: Optimizer | None = None,
        device: torch.device | str = "cpu",
        state_dim: int | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer is {optimizer!r}, but must be None or one of "
                "torchrec_hkv.hash_table.optimizers, such as SGD()."
            )
        self.optimizer = optimizer
        self.tables = tuple(tables)
        self.feature_tables = tuple(feature_tables)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        kernels_optimizer = (
            _C.OptimizerConfig(kind=_C.Optimizer.NONE) if optimizer is None else optimizer.config()
        )
        configs = [
            self._config(
                spec, kernels_optimizer.state_width(spec.dim) if state_dim is None else state_dim
            )
            for spec in self.tables
        ]
        on_gpu = self.device.type == "cuda" and _C.has_cuda
        available = (*(gpu_memory(self.device) if on_gpu else (0, 0)), *host_memory())
        self._group = _C.TableGroup(
            configs, list(feature_tables), kernels_optimizer, state_dim, self.device, available
        )
        self._all_on_host = torch.tensor(
            [self.device.type == "cpu" or config.hbm_slots == 0 for config in configs],
            device=self.device,
        )
        self._accumulator = Accumulator(self._group, optimizer)
        self._strict = [table for table, spec in enumerate(self.tables) if spec.strict]
        self._crowded = [0] * len(self.tables)

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
        check_expire_after(f"table '{spec.name}'", spec.expire_after)
        check_strict(f"table '{spec.name}'", spec.strict)
        check_remember_evicted(f"table '{spec.name}'", spec.remember_evicted)
        try:
            admission = admission_config(spec.admission)
        except ValueError as error:
            raise ValueError(f"table '{spec.name}': {error}") from None
        memory = table_memory(
            spec.capacity,
            spec.dim,
            state_dim,
            spec.eviction,
            spec.dtype.itemsize,
            spec.admission,
            spec.initial_capacity,
            spec.remember_evicted,
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
            admission=admission,
            expire_after=spec.expire_after or 0,
            remember_evicted=spec.remember_evicted or 0,
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

    @property
    def growths(self) -> int:
        """How often tables have grown so far; slots found before are not valid any more."""
        return self._group.growths

    @property
    def num_features(self) -> int:
        """Features of a lookup."""
        return self._group.num_features

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
        """int64 ``[tables, 12]`` on the device; ops that change a table write it."""
        return self._group.counters

    @property
    def state_layout(self) -> int:
        """What the columns of the optimizer states are, as a number; 0 without an optimizer."""
        return 0 if self.optimizer is None else self.optimizer.config().layout

    @property
    def optimizer_steps(self) -> Tensor:
        """Updates of each table so far, int64 ``[tables]`` on the device; updates count it on."""
        return self._group.optimizer_steps

    @property
    def clock(self) -> int:
        """The number of the last call that counted (waits for the device)."""
        return self._group.clock

    def set_clock(self, clock: int) -> None:
        """Sets the number of the last call, before contents of that time are loaded.

        Raises:
            ValueError: it is out of range, or the backward of a lookup is still to come.
        """
        self._group.set_clock(clock)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the epoch policies for the calls to come; does not wait.

        Raises:
            ValueError: it is not from 0 to 2^32 - 1.
        """
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"epoch is {epoch}, but must be from 0 to 2^32 - 1.")
        self._group.set_epoch(epoch)

    def pin(self) -> Pin:
        """A pin for the rows of one training lookup.

        Given to :meth:`find_or_insert` and :meth:`pooled_lookup`, it keeps the rows where they are
        until the backward, or until nothing refers to it any more.

        Raises:
            RuntimeError: 64 lookups wait for their backward or belong to CUDA graphs.
        """
        return self._group.pin()

    def find(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        batch_size: int,
        bags: Sequence[int] | None = None,
    ) -> Tensor:
        """Slots of ids, -1 where a table has no such id. Changes nothing.

        Args:
            ids: int64 ``[n]``, feature-major.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``; None for one bag of all
                ids, where the group has one feature.
            batch_size: bags a feature.
            bags: the number of bags of each feature, where they differ in them; then ``offsets``
                are int64 ``[sum of bags + 1]``, and ``batch_size`` says nothing.

        Returns:
            int64 ``[n]``, slots numbered through the group's tables.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a length or device is not as above; on a CPU also offsets that decrease or
                do not end with ``n``. On a GPU as :meth:`check_offsets` says.
        """
        return _ops.find(self.handle, ids, offsets, batch_size, bags)

    def find_or_insert(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        pin: Pin | None = None,
        bags: Sequence[int] | None = None,
    ) -> Tensor:
        """As :meth:`find`, and inserts missing ids with their initial rows.

        A table that has not its full capacity yet may grow before (and then waits for the device).
        An id finds no place, and gets -1, where both of its buckets are full of ids that were
        looked up in this call or in one whose backward is still to come; and where its table does
        not admit it.

        Before the call looks for ids, in tables with ``expire_after``, entries of one in
        ``min(64, expire_after)`` buckets leave where they were last touched more than
        ``expire_after`` steps ago; every bucket has its turn. Entries whose backward is still to
        come stay. Counts of ids that are not admitted are halved where it is the time to.

        Args:
            ids: as in :meth:`find`.
            offsets: as in :meth:`find`.
            batch_size: as in :meth:`find`.
            pin: a new :meth:`pin`, where a backward is to come; without one, slots are valid until
                the next call that inserts.
            bags: as in :meth:`find`.

        Raises:
            RuntimeError: as :meth:`check_strict` says.
        """
        counters, number = self._group.counters, None if pin is None else pin.number
        slots = _ops.find_or_insert(counters, self.handle, ids, offsets, batch_size, number, bags)
        self.check_strict()
        return slots

    def expire(self) -> None:
        """Lets all entries leave that were last touched more than ``expire_after`` steps ago.

        It does not count as a step, and waits for nothing.
        """
        _ops.expire(self._group.counters, self.handle)

    def check_offsets(self) -> None:
        """Raises if a GPU has been given offsets that decrease or overrun the ids.

        On a GPU nobody looks at offsets before a call returns, which would make the host wait. Its
        kernels never read or write outside of arrays for that: such bags give zeros or sums of
        wrong rows, and from then on no row is updated. The first call of the group that is made
        after the GPU has got there raises, whatever it is, and so do :meth:`counters`, which wait
        for it. Then everything goes on. Does not wait.

        Raises:
            ValueError: it names a bag and its offsets.
        """
        self._group.check_offsets()

    def check_strict(self) -> None:
        """Raises if a strict table has refused an id for lack of a place since the last check.

        Waits for the device where the group has a strict table, so that such a group can't be
        captured in a CUDA graph. The other ids of the call have been placed then.

        Raises:
            RuntimeError: it names the tables, their load, and what to change.
        """
        if crowded := self.take_crowded():
            sizes = self.sizes()
            sentences = (
                crowded_message(
                    self.tables[table].name,
                    number,
                    sizes[table],
                    self.present_slots(table),
                )
                for table, number in crowded.items()
            )
            raise RuntimeError(" ".join(sentences))

    def take_crowded(self) -> dict[int, int]:
        """How many ids each strict table has refused for lack of a place since this was last asked.

        An id that repeats within a call counts at least once. Waits for the device where the group
        has a strict table.

        Returns:
            Numbers above 0 by table.
        """
        if not self._strict:
            return {}
        before, self._crowded = self._crowded, self._group.counters[:, _CROWDED].tolist()
        numbers = {table: self._crowded[table] - before[table] for table in self._strict}
        return {table: number for table, number in numbers.items() if number > 0}

    def pooled_lookup(
        self,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        slots: Tensor,
        batch_size: int,
        mean: bool,
        pin: Pin | None,
        learning_rate: Tensor,
        bags: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
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
            pin: that of :meth:`find_or_insert`; None in evaluation, where nothing is trained.
            learning_rate: float32 ``[]`` on the device. The backward takes what it is then, so that
                it may change in between, and between replays of a CUDA graph.
            bags: as in :meth:`find`.
            dtype: of the result: float32, which None stands for, float16 or bfloat16. Rows are
                added up in float32 and rounded once. Gradients are of the same dtype.

        Returns:
            ``[batch_size, total_dim]``; with ``bags`` ``[sum of bags * dims]``, features one after
            the other, each as ``[bags, dim]``.
        """
        bags = None if bags is None else tuple(bags)
        if pin is not None and self._accumulator.is_needed:
            batch = (ids, offsets, slots, batch_size, mean)
            return self._accumulator.lookup(
                anchor, weights, *batch, pin, learning_rate, bags, dtype
            )
        return _ops.pooled_lookup(
            anchor,
            self.handle,
            ids,
            offsets,
            weights,
            slots,
            batch_size,
            mean,
            None if pin is None else pin.number,
            learning_rate,
            bags,
            dtype,
        )

    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, lookups are made whose backwards do not train: they hold their gradients.

        The backward of the next lookup that is made outside of it applies all of them together, as
        one update at its own learning rate. Until then the rows of all of them stay pinned.
        """
        return self._accumulator.hold()

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

    def read_admission(self, table: int, first: int, n: int) -> Tensor:
        """A copy of ``n`` bytes of a table's counts of ids that are not admitted, from ``first``.

        Returns:
            uint8 on the table's device; what they are says ``csrc/hash_table/admission.h``.
        """
        return self._group.read_admission(table, first, n)

    def write_admission(self, table: int, first: int, counts: Tensor) -> None:
        """Overwrites such bytes."""
        self._group.write_admission(table, first, counts)

    def fill_frames(self, table: int) -> None:
        """Brings the rows of the highest rank into HBM, as far as there is room.

        For a table with rows in host memory that has just been filled otherwise than by lookups.
        Elsewhere nothing happens.
        """
        self._group.fill_frames(table)

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
            older_than: last touched more than this many steps before the last one.

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

        ``lookups`` are ids of training lookups and insertions, ``hits`` those that were there,
        ``inserted`` those that were placed, ``evicted`` those in whose place they were,
        ``refused`` those that found no place, ``unadmitted`` those that were not admitted;
        ``expired`` are entries that left for their age. Of tables with rows in host memory,
        ``fetched`` are rows that came into HBM, ``written_home`` those that had changed there and
        were written to host memory when others took their place. ``host_hits`` are the hits whose
        row was in host memory (on a CPU all of them), ``returned`` the ids placed that the table
        remembers as evicted (0 without ``remember_evicted``). Waits for the device.

        Raises:
            ValueError: as :meth:`check_offsets` says.
        """
        # First: waits for calls on other streams too.
        sizes = self._group.sizes().tolist()
        counts = self._counts().tolist()
        self.check_offsets()
        capacities = map(self._group.full_slots, range(len(self.tables)))
        return [
            {**dict(zip(DEVICE_COUNTS[:-1], count, strict=True)), "size": size, "capacity": slots}
            for count, size, slots in zip(counts, sizes, capacities, strict=True)
        ]

    def device_counters(self) -> Tensor:
        """:data:`DEVICE_COUNTS` of each table, int64 ``[tables, 12]`` on the device; no wait."""
        sizes = self._group.sizes().to(self.device)  # first: in order with other streams
        return torch.cat([self._counts(), sizes.unsqueeze(1)], dim=1)

    def _counts(self) -> Tensor:
        """:data:`DEVICE_COUNTS` but for the last."""
        counted = dict(zip(_COUNTERS, self._group.counters.unbind(1), strict=True))
        counted["hits"] = counted["lookups"] - counted["misses"]
        # Kernels count hits in host memory where there are frames in HBM; elsewhere a table has all
        # its rows in one memory.
        counted["host_hits"] = torch.where(self._all_on_host, counted["hits"], counted["host_hits"])
        return torch.stack([counted[name] for name in DEVICE_COUNTS[:-1]], dim=1)

    def hbm_bytes(self, table: int) -> int:
        """Bytes a table takes of a GPU's memory."""
        return self._group.hbm_bytes(table)

    def host_bytes(self, table: int) -> int:
        """Bytes a table takes of host memory."""
        return self._group.host_bytes(table)
