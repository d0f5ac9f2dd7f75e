"""Tables that are looked up and trained in one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.devices import known_device
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory
from torchrec_hkv.hash_table.eviction import name_of
from torchrec_hkv.hash_table.groups.accumulation import Accumulator
from torchrec_hkv.hash_table.groups.call_arguments import CallArguments
from torchrec_hkv.hash_table.groups.copies import GroupCopies
from torchrec_hkv.hash_table.groups.counters import COUNTERS, GroupCounters
from torchrec_hkv.hash_table.groups.rows import GroupRows
from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.hash_table.table_config import check_types, table_config
from torchrec_hkv.hash_table.table_spec import TableSpec

_ops = torch.ops.torchrec_hkv
# The overload itself: the packet looks for it in Python with each call.
_train_lookup = _ops.train_lookup.default
#: Keeps the rows of one training lookup in place until its backward; see :meth:`TableGroup.pin`.
Pin = _C.Pin


class TableGroup(GroupCopies, GroupRows, GroupCounters):
    """Hash tables of any dims and capacities behind one lookup.

    :class:`torchrec_hkv.hash_table.groups.calls.GroupCalls` has HierarchicalKV's operations on
    them, :class:`torchrec_hkv.hash_table.groups.selection.GroupSelection` what goes by score and
    age.

    Args:
        tables: the tables.
        feature_tables: for each feature, in the order of the output's columns, its table's index.
        optimizer: what trains the rows (:mod:`torchrec_hkv.hash_table.optimizers`), or None for
            tables that are not trained.
        device: a CPU or CUDA device.
        state_dim: float32 values of state that a row of every table keeps; by default what the
            optimizer needs.
        labels: what messages call the tables; by default their names.

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
        labels: Sequence[str] | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer is {optimizer!r}, but must be None or one of "
                "torchrec_hkv.hash_table.optimizers, such as SGD()."
            )
        self.optimizer = optimizer
        self._given_state_dim = state_dim
        self._epoch = 0
        self.tables = tuple(tables)
        self.feature_tables = tuple(feature_tables)
        self.device = known_device(device)
        kernels_optimizer = (
            _C.OptimizerConfig(kind=_C.Optimizer.NONE) if optimizer is None else optimizer.config()
        )
        for spec in self.tables:
            check_types(spec)
        configs = [
            table_config(
                spec,
                kernels_optimizer.state_width(spec.dim) if state_dim is None else state_dim,
                self.device,
            )
            for spec in self.tables
        ]
        on_gpu = self.device.type == "cuda" and _C.has_cuda
        available = (*(gpu_memory(self.device) if on_gpu else (0, 0)), *host_memory())
        self._group = _C.TableGroup(
            configs, list(feature_tables), kernels_optimizer, state_dim, self.device, available
        )
        self._handle: int = self._group.handle
        self._counters: Tensor = self._group.counters
        self._count_hits_by_memory(configs)
        self._accumulator = Accumulator(self._group, optimizer)
        self._watch(self.tables, labels)
        self._arguments = CallArguments.of(self.tables, self.device)
        self._number_slots()

    @property
    def handle(self) -> int:
        """The number that names this group in ops."""
        return self._handle

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

    @property
    def first_open_step(self) -> int:
        """The earliest step whose rows may still change without being looked up again (waits for
        the device): that of the oldest lookup with a pin whose backward is to come, or else the one
        after :attr:`clock`."""
        return self._group.first_open_step

    def set_clock(self, clock: int) -> None:
        """Sets the number of the last call, before contents of that time are loaded.

        Raises:
            ValueError: it is out of range, or the backward of a lookup is still to come.
        """
        self.note_rewrite()
        self._group.set_clock(clock)

    def advance_clock(self, clock: int) -> None:
        """Puts the number of the last call forward, as if so many calls had looked up nothing.

        Raises:
            ValueError: it is less than :attr:`clock`, or the backward of a lookup is still to come.
        """
        now = self.clock
        if clock < now:
            raise ValueError(f"clock is {clock}, but must be at least {now}, what it is now.")
        if clock > now:
            self._group.set_clock(clock)

    @property
    def epoch(self) -> int:
        """Of the epoch policies, for the calls to come; see :meth:`set_epoch`."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the epoch policies for the calls to come; does not wait.

        Raises:
            ValueError: it is not from 0 to 2^32 - 1.
        """
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"epoch is {epoch}, but must be from 0 to 2^32 - 1.")
        self._group.set_epoch(epoch)
        self._epoch = epoch

    @property
    def aged_lfu(self) -> Tensor:
        """What tables under :class:`AgedLFU` measure, float64 ``[tables, 7]`` on the device: c; the
        lookups of some calls, and the number of these; four more. Zeros under other policies."""
        return self._group.aged_lfu

    @property
    def miniature_tally(self) -> Tensor:
        """What the miniatures of ``"adaptive"`` tables have counted, int64 ``[tables, 14]`` on the
        device (``csrc/hash_table/miniatures.h``)."""
        return self._group.miniature_tally

    def measured_aging(self, table: int) -> tuple[float, float, float] | None:
        """From what a table under :class:`AgedLFU` or ``"adaptive"`` tells its half-life: the
        lookups of some calls, the number of these, and c (at most 1e300); None under other
        policies. Waits for the device."""
        if name_of(self.tables[table].eviction) != "aged_lfu":
            return None
        c, lookups, steps, seen_lookups, seen_step, *_ = self.aged_lfu[table].tolist()
        if seen_step >= 0:
            counted = int(self.counter_tensor[table, COUNTERS.index("lookups")])
            lookups += counted - seen_lookups
            steps += self.clock + 1 - seen_step
        return lookups, steps, min(c, 1e300)

    def restart_aging(self, table: int, measured: tuple[float, float, float] | None) -> None:
        """Has a table go on from :meth:`measured_aging` of another; None: begin anew. Its c only
        counts where the table chooses that itself."""
        self._group.restart_aging(table, *(measured or (0.0, 0.0, -1.0)))

    def set_aging(self, table: int, c: float) -> None:
        """Sets the c of a table under :class:`AgedLFU` for the calls to come; does not wait.

        Raises:
            ValueError: ``c`` is less than 0, or the table has another policy.
        """
        self._group.set_aging(table, c)

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
            ids: integers ``[n]`` of 8 to 64 bits, feature-major; a uint64 id stands for the int64
                of the same bits.
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
        return _ops.find(self.handle, int64_ids(ids), offsets, batch_size, bags)

    def find_or_insert(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        pin: Pin | None = None,
        bags: Sequence[int] | None = None,
        scores: Tensor | None = None,
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
            scores: int64 ``[n]``, where a table of the group is under ``"customized"``, and read
                by such tables alone; elsewhere each id counts once. Of several scores for an id one
                stays (on a CPU, and in a deterministic group, the last). A new id takes the place
                of the lowest score even where its own is lower, since it is to be trained.

        Raises:
            RuntimeError: as :meth:`check_strict` says.
            TypeError: the scores are no int64.
            ValueError: scores are missing or needless, or not one for each id.
        """
        counters, number = self._group.counters, None if pin is None else pin.number
        ids = int64_ids(ids)
        slots = _ops.find_or_insert(
            counters, self.handle, ids, offsets, batch_size, number, bags, scores
        )
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
        ids = int64_ids(ids)
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

    def train_lookup(
        self,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        mean: bool,
        learning_rate: Tensor,
        bags: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """A training lookup: :meth:`find_or_insert` and :meth:`pooled_lookup` in one call, with a
        pin of their own.

        Args:
            anchor: as in :meth:`pooled_lookup`; without a backward to come the rows are pinned
                while they are pooled only.
            ids: as in :meth:`find`.
            offsets: as in :meth:`find`.
            weights: as in :meth:`pooled_lookup`.
            batch_size: as in :meth:`find`.
            mean: as in :meth:`pooled_lookup`.
            learning_rate: as in :meth:`pooled_lookup`.
            bags: as in :meth:`find`.
            dtype: as in :meth:`pooled_lookup`.
            scores: as in :meth:`find_or_insert`.

        Returns:
            As :meth:`pooled_lookup`.

        Raises:
            TypeError: a dtype is not as there.
            ValueError: a length or device is not as there. Nothing has changed then.
            RuntimeError: as :meth:`pin` and :meth:`check_strict` say.
        """
        if self._accumulator.is_needed:
            pin = self.pin()
            slots = self.find_or_insert(ids, offsets, batch_size, pin, bags, scores)
            where = (ids, offsets, weights, slots, batch_size, mean, pin)
            return self.pooled_lookup(anchor, *where, learning_rate, bags, dtype)
        pooled = _train_lookup(
            self._counters,
            anchor,
            self._handle,
            int64_ids(ids),
            offsets,
            weights,
            batch_size,
            mean,
            learning_rate,
            bags,
            dtype,
            scores,
        )
        if self._strict:
            self.check_strict()
        return pooled

    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, lookups are made whose backwards do not train: they hold their gradients.

        The backward of the next lookup that is made outside of it applies all of them together, as
        one update at its own learning rate. Until then the rows of all of them stay pinned.
        """
        return self._accumulator.hold()
