"""A group of hash tables that are looked up and trained in one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.devices import checked_device
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory
from torchrec_hkv.hash_table.groups.accumulation import Accumulator
from torchrec_hkv.hash_table.groups.aging import GroupAging
from torchrec_hkv.hash_table.groups.call_arguments import CallArguments
from torchrec_hkv.hash_table.groups.clock import GroupClock
from torchrec_hkv.hash_table.groups.copies import GroupCopies
from torchrec_hkv.hash_table.groups.counters import GroupCounters
from torchrec_hkv.hash_table.groups.rows import GroupRows
from torchrec_hkv.hash_table.id_types import int64_ids
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.hash_table.table_config import check_types, table_config
from torchrec_hkv.hash_table.table_spec import TableSpec

_ops = torch.ops.torchrec_hkv
# The overload itself: looking it up in the packet takes time in each call.
_train_lookup = _ops.train_lookup.default
#: Keeps the rows of one training lookup in place until its backward; see :meth:`TableGroup.pin`.
Pin = _C.Pin


class TableGroup(GroupCopies, GroupRows, GroupCounters, GroupClock, GroupAging):
    """Hash tables of any dims and capacities behind one lookup.

    :class:`torchrec_hkv.hash_table.groups.calls.GroupCalls` has the operations of HierarchicalKV,
    :class:`torchrec_hkv.hash_table.groups.selection.GroupSelection` those by score and age.

    Args:
        tables: the tables.
        feature_tables: index of the table of each feature, in the order of the output's columns.
        optimizer: optimizer of the rows (:mod:`torchrec_hkv.hash_table.optimizers`), or None for
            tables that are not trained.
        device: a CPU or CUDA device.
        state_dim: number of float32 state values of a row, in all tables; by default what the
            optimizer needs.
        labels: names of the tables in messages; by default their names.

    Raises:
        ValueError: an argument has an invalid value; the message names it.
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
        self._state_dim_argument = state_dim
        self.tables = tuple(tables)
        self.feature_tables = tuple(feature_tables)
        self.device = checked_device(device)
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
        """The number that identifies this group in ops."""
        return self._handle

    @property
    def total_dim(self) -> int:
        """Number of columns of all features."""
        return self._group.total_dim

    @property
    def num_slots(self) -> int:
        """Number of slots of all tables at full capacity. Slot numbers are below it."""
        return self._group.num_slots

    @property
    def growths(self) -> int:
        """Number of times that tables have grown. Slots found before a growth are invalid."""
        return self._group.growths

    @property
    def num_features(self) -> int:
        """Number of features of a lookup."""
        return self._group.num_features

    @property
    def state_layout(self) -> int:
        """The layout of the optimizer states, as a number; 0 without an optimizer."""
        return 0 if self.optimizer is None else self.optimizer.config().layout

    @property
    def optimizer_steps(self) -> Tensor:
        """Number of updates of each table so far, int64 ``[tables]`` on the device."""
        return self._group.optimizer_steps

    def pin(self) -> Pin:
        """A pin for the rows of one training lookup.

        Pass it to :meth:`find_or_insert` and :meth:`pooled_lookup`. It keeps the rows in their
        slots until the backward has run, or until the pin is deleted.

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
        """Looks up slots; -1 for ids that are not in their table. Changes nothing.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits, feature-major; a uint64 id stands for the int64
                with the same bits.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``; None for one bag of all
                ids, if the group has one feature.
            batch_size: number of bags of each feature.
            bags: number of bags of each feature, if they differ. ``offsets`` are int64
                ``[sum of bags + 1]`` then, and ``batch_size`` is ignored.

        Returns:
            int64 ``[n]``, slots numbered over all tables of the group.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another length or device; on a CPU also if offsets decrease
                or do not end with ``n``. For offsets on a GPU see :meth:`check_offsets`.
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
        """Looks up slots like :meth:`find`, and inserts missing ids with their initial rows.

        A table below its full capacity may grow first, which synchronizes with the device. An id
        gets -1 if both of its buckets are full of ids that were looked up in this call or in calls
        whose backward has not run, or if its table does not admit it.

        Before the lookup, tables with ``expire_after`` scan one in ``min(64, expire_after)``
        buckets in turn, and remove entries that were last touched more than ``expire_after`` steps
        ago. Entries with a pending backward stay. Admission counters are halved if due.

        Args:
            ids: see :meth:`find`.
            offsets: see :meth:`find`.
            batch_size: see :meth:`find`.
            pin: a new :meth:`pin` if a backward follows. Without one, slots are valid until the
                next call that inserts.
            bags: see :meth:`find`.
            scores: int64 ``[n]``, if a table of the group is under ``"customized"``; only such
                tables read it. In other tables each id counts once. If an id has several scores,
                one is kept (on a CPU, and in a deterministic group, the last). A new id is inserted
                even if its score is lower than all others, because it has to be trained.

        Raises:
            RuntimeError: see :meth:`check_strict`.
            TypeError: the scores are not int64.
            ValueError: scores are missing or not allowed, or have another length.
        """
        counters, number = self._group.counters, None if pin is None else pin.number
        ids = int64_ids(ids)
        slots = _ops.find_or_insert(
            counters, self.handle, ids, offsets, batch_size, number, bags, scores
        )
        self.check_strict()
        return slots

    def expire(self) -> None:
        """Removes all entries that were last touched more than ``expire_after`` steps ago.

        Does not count as a step, and does not synchronize.
        """
        _ops.expire(self._group.counters, self.handle)

    def check_offsets(self) -> None:
        """Raises if a GPU has been given offsets that decrease or exceed the number of ids.

        On a GPU, calls return without a check of their offsets, because it would synchronize. The
        kernels never access memory out of bounds: invalid bags give zeros or sums of wrong rows,
        and from then on no row is updated. The first call of the group after the GPU has detected
        the error raises, as does :meth:`counters`, which waits for the GPU. After that the group
        works as before. Does not synchronize.

        Raises:
            ValueError: offsets were invalid; the message names a bag and its offsets.
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
        """Pools the rows of each bag. The backward updates the rows.

        Args:
            anchor: a tensor that requires grad if the lookup is to be trained.
            ids: see :meth:`find`.
            offsets: see :meth:`find`.
            weights: float32 ``[n]`` or None.
            slots: result of :meth:`find` or :meth:`find_or_insert`. An id without a slot counts
                with its initial row and is not trained.
            batch_size: see :meth:`find`.
            mean: whether to divide by the number of ids in the bag.
            pin: the pin passed to :meth:`find_or_insert`; None in evaluation.
            learning_rate: float32 ``[]`` on the device. The backward reads its value when it runs,
                so the value may change before, and between replays of a CUDA graph.
            bags: see :meth:`find`.
            dtype: dtype of the result and of its gradient: float32 (None), float16 or bfloat16.
                Rows are summed in float32 and rounded once.

        Returns:
            ``[batch_size, total_dim]``; with ``bags``, ``[sum of bags * dims]``, one feature after
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
        """A training lookup: :meth:`find_or_insert` and :meth:`pooled_lookup` in one call, with
        their own pin.

        Args:
            anchor: see :meth:`pooled_lookup`. If no backward follows, the rows are pinned only
                while they are pooled.
            ids: see :meth:`find`.
            offsets: see :meth:`find`.
            weights: see :meth:`pooled_lookup`.
            batch_size: see :meth:`find`.
            mean: see :meth:`pooled_lookup`.
            learning_rate: see :meth:`pooled_lookup`.
            bags: see :meth:`find`.
            dtype: see :meth:`pooled_lookup`.
            scores: see :meth:`find_or_insert`.

        Returns:
            See :meth:`pooled_lookup`.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another length or device. Nothing has changed then.
            RuntimeError: see :meth:`pin` and :meth:`check_strict`.
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
        """A context in which the backwards of lookups store their gradients instead of updating
        rows.

        The backward of the next lookup outside the context applies all stored gradients in one
        update at its own learning rate. Until then all their rows stay pinned.
        """
        return self._accumulator.hold()
