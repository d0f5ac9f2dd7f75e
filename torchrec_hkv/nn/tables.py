"""The tables of a module: a group, its stored gradients, and its updates."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.groups.accumulation import PendingGradient, as_one_batch
from torchrec_hkv.nn import contents
from torchrec_hkv.nn.contents import Contents
from torchrec_hkv.nn.gradient_buffer import GradientBuffer, bag_offsets
from torchrec_hkv.nn.lookup import LookupFunction, PinScope, SlotLookup
from torchrec_hkv.nn.marker import Marker, graph_task
from torchrec_hkv.nn.table_plan import Plan, make_group
from torchrec_hkv.nn.warn import warn

_ops = torch.ops.torchrec_hkv
# Number of batch shapes whose offsets are cached.
_CACHED_OFFSETS = 4
# Number of growths that marks slots as outdated: they are found again when they are needed.
_OUTDATED = -1


@dataclasses.dataclass(frozen=True)
class Progress:
    """Clock, epoch and aging of tables.

    Attributes:
        clock: number of the last lookup in training.
        epoch: epoch of the epoch policies.
        aging: result of :meth:`TableGroup.measured_aging` for each table.
    """

    clock: int
    epoch: int
    aging: tuple[tuple[float, float, float] | None, ...]

    @classmethod
    def read(cls, group: TableGroup) -> Progress:
        """Reads the progress of a group. Synchronizes with the device."""
        aging = tuple(group.measured_aging(table) for table in range(len(group.tables)))
        return cls(group.clock, group.epoch, aging)

    def restore(self, group: TableGroup) -> None:
        """Sets the progress of a group."""
        group.set_clock(self.clock)
        group.set_epoch(self.epoch)
        for table, measured in enumerate(self.aging):
            if measured is not None:
                group.restart_aging(table, measured)


class Tables:
    """The tables of a module.

    Args:
        plan: the properties of the tables.
        marker: marker of the module's anchor.

    Raises:
        ValueError: not even the initial capacity fits in memory, or the group refuses an argument.
    """

    def __init__(self, plan: Plan, marker: Marker) -> None:
        self.marker = marker
        #: Whether an optimizer of this package or ``apply_gradients`` trains the tables.
        self.is_trained = False
        self._interval: weakref.ref[PinScope] | None = None
        self._offsets: dict[tuple[int, ...], Tensor] = {}
        self._set(plan, *make_group(plan))

    def _set(self, plan: Plan, group: TableGroup, capacity: int) -> None:
        self.plan = plan
        self.group = group
        self.capacity = capacity
        self._gradients = GradientBuffer(plan.gradient_bytes, group, plan.dim)
        self._interval = None
        self._offsets.clear()
        self._no_rate = torch.zeros((), device=group.device)
        self._rate = torch.zeros((), device=group.device)
        self._rate_value = 0.0

    # -- lookups ----------------------------------------------------------------------------------

    def lookup(
        self,
        ids: Sequence[Tensor],
        padding_idx: int | None,
        training: bool,
        scores: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Looks up rows.

        Args:
            ids: for each table int64 ``[n]`` on the tables' device.
            padding_idx: an id whose row is zeros and is not trained.
            training: whether to insert missing ids, and to store the gradient.
            scores: for each table int64 ``[n]``, for training under ``"customized"``.

        Returns:
            For each table float32 ``[largest n, dim]``; zeros after its last id.
        """
        sizes = tuple(part.numel() for part in ids)
        flat = torch.cat(list(ids)) if len(ids) > 1 else ids[0].contiguous()
        offsets, batch_size = self._offsets_of(sizes), max(sizes)
        interval = None
        if training:
            joined_scores = None if scores is None else torch.cat(list(scores))
            slots, interval = self._find_or_insert(flat, offsets, batch_size, joined_scores)
        else:
            slots = self.group.find(flat, offsets, batch_size)
        weights = None
        if padding_idx is not None:
            is_padding = flat == padding_idx
            weights = is_padding.logical_not().float()
            slots = slots.masked_fill(is_padding, -1)
        growths = self.group.growths
        found = SlotLookup(flat, offsets, weights, slots, sizes, batch_size, growths, interval)
        if training:
            return LookupFunction.apply(self.marker.anchor, self, found)
        return self.rows_by_table(found)

    def rows_by_table(self, found: SlotLookup) -> tuple[Tensor, ...]:
        """Rows of found slots, for each table ``[batch_size, dim]``; not recorded by autograd."""
        with torch.no_grad():
            rows = self.group.pooled_lookup(
                self._no_rate,
                found.ids,
                found.offsets,
                found.weights,
                found.slots,
                found.batch_size,
                False,
                None,
                self._no_rate,
            )
            tables = len(found.sizes)
            if tables == 1:
                return (rows,)
            return rows.view(found.batch_size, tables, self.plan.dim).unbind(1)

    def _find_or_insert(
        self, ids: Tensor, offsets: Tensor, batch_size: int, scores: Tensor | None
    ) -> tuple[Tensor, PinScope]:
        interval = None if self._interval is None else self._interval()
        pin = None
        if interval is None:
            pin = self.group.pin()
            interval = PinScope(pin)
        slots = self.group.find_or_insert(ids, offsets, batch_size, pin, scores=scores)
        self._interval = weakref.ref(interval)
        return slots, interval

    def _offsets_of(self, sizes: tuple[int, ...]) -> Tensor:
        offsets = self._offsets.pop(sizes, None)
        if offsets is None:
            offsets = bag_offsets(sizes, self.group.device)
        self._offsets[sizes] = offsets  # the last used comes last
        if len(self._offsets) > _CACHED_OFFSETS:
            del self._offsets[next(iter(self._offsets))]
        return offsets

    # -- gradients --------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients are stored."""
        return bool(self._gradients) and not self.marker.was_dropped

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the stored gradients."""
        return self._gradients.bytes

    def hold(self, grad: Tensor, found: SlotLookup) -> None:
        """Stores the gradient of a lookup, a contiguous tensor that nothing else changes.

        Raises:
            RuntimeError: the buffer is full. Nothing has changed then.
        """
        if self.marker.was_dropped:
            self.drop()
        elif self.marker.was_written:
            self._gradients.scale(self.marker.factor())
            self.marker.clear()
        if found.ids.numel() == 0:
            return
        growths = found.growths
        if found.interval is None:  # a second backward of a graph, whose pin may be released
            growths = _OUTDATED
        backward = PendingGradient(
            grad,
            found.ids,
            found.offsets,
            None,  # padding has no slot
            found.slots,
            growths,
            found.batch_size,
            False,
            found.interval,
        )
        self._gradients.add(backward, found.sizes, graph_task())

    def apply(self, learning_rate: float | Tensor, scale: Tensor | None = None) -> None:
        """Updates each row once by all stored gradients, and drops them. Does not synchronize with
        the device.

        Args:
            learning_rate: learning rate of this update.
            scale: scale of the loss, if a ``GradScaler`` makes the step. Gradients are divided by
                it. If a gradient is not finite, nothing changes and the step does not count.
        """
        self.is_trained = True
        self.marker.checks = scale is not None
        self._gradients.drop_tasks(self.marker.never_added())
        if not self.holds_gradients:
            self.drop()
            return
        factor, finite = self.marker.factor(), None
        if scale is not None:
            factor = (1 if factor is None else factor) / scale
            # The factor is not enough: the first backwards do not check their gradients.
            finite = factor.isfinite().all() & self._gradients.finite()
        rounds, group = self._gradients.take(), self.group
        dims = [group.tables[table].dim for table in group.feature_tables]
        grad, ids, offsets, weights, slots, batch_size, mean, bags = as_one_batch(rounds, dims)
        if factor is not None:
            weights = factor.expand(ids.numel()).contiguous()
        if finite is not None:
            slots = slots.masked_fill(finite.logical_not(), -1)
        _ops.update_rows(
            group.counter_tensor,
            group.handle,
            grad,
            ids,
            offsets,
            weights,
            slots,
            batch_size,
            mean,
            self._rate_of(learning_rate),
            len(rounds),
            bags,
        )
        if finite is not None:
            group.optimizer_steps.sub_(finite.logical_not().long())
        self.drop()

    def drop(self) -> None:
        """Drops the stored gradients."""
        if self._gradients and not self.is_trained:
            self.is_trained = True  # warns only once
            warn(
                "The gradients of hash tables were dropped, and no optimizer has ever applied any: "
                "give this embedding to an HKV optimizer, such as HKVAdamOptimizer, since others "
                "don't train its rows."
            )
        self._gradients.drop()
        self.marker.never_added()
        self.marker.clear()
        self._interval = None

    def _rate_of(self, learning_rate: float | Tensor) -> Tensor:
        if isinstance(learning_rate, Tensor) and learning_rate.device.type != "cpu":
            self._rate.copy_(learning_rate.detach().view(()), non_blocking=True)
            self._rate_value = float("nan")  # unknown on the host
        elif (value := float(learning_rate)) != self._rate_value:
            self._rate.fill_(value)
            self._rate_value = value
        return self._rate

    # -- state of all tables -----------------------------------------------------------------------

    def contents(self) -> list[Contents]:
        """The contents of each table. Synchronizes with the device."""
        return [contents.take(self.group, table) for table in range(len(self.plan.names))]

    def replace(
        self,
        plan: Plan,
        loaded: Sequence[Contents] | None = None,
        eviction_state: Progress | None = None,
        steps: Tensor | None = None,
    ) -> None:
        """Rebuilds the tables, with their own or with loaded contents.

        Optimizer states are set to zero if the optimizer changes. Unless the tables are empty, this
        needs memory for the old and the new tables. If it fails, nothing changes.

        Args:
            plan: properties of the new tables.
            loaded: new contents of each table; None to keep the contents.
            eviction_state: clock, epoch and aging of ``loaded``; None to keep the current ones.
            steps: number of updates of each table, if the optimizer stays; None to keep it.

        Raises:
            RuntimeError: gradients are stored.
            ValueError: the tables can't be created, for example because they don't fit in memory.
        """
        self.check_no_gradients()
        before, was_empty = self.plan, not any(self.group.sizes())
        stored = self.contents() if loaded is None else loaded
        progress_before, steps_before = (
            Progress.read(self.group),
            self.group.optimizer_steps.clone(),
        )
        if was_empty:  # frees the old tables first, because their memory may be needed
            del self.group, self._gradients
        try:
            rebuilt = self._rebuilt(
                plan,
                stored,
                progress_before if eviction_state is None else eviction_state,
                steps_before if steps is None else steps,
            )
        except BaseException:
            if was_empty:
                rebuilt = make_group(before)
                progress_before.restore(rebuilt[0])
                rebuilt[0].optimizer_steps.copy_(steps_before)
                self._set(before, *rebuilt)
            raise
        self._set(plan, *rebuilt)

    def _rebuilt(
        self,
        plan: Plan,
        stored: Sequence[Contents],
        eviction_state: Progress,
        steps: Tensor,
    ) -> tuple[TableGroup, int]:
        group, capacity = make_group(plan)
        eviction_state.restore(group)
        keeps_states = plan.optimizer == self.plan.optimizer
        for table, of_table in enumerate(stored):
            if not keeps_states:
                of_table = dataclasses.replace(of_table, states=of_table.states[:, :0])
            contents.put(group, table, of_table)
        if keeps_states:
            group.optimizer_steps.copy_(steps)
        return group, capacity

    def check_no_gradients(self) -> None:
        """Raises RuntimeError if gradients are stored, which belong to the current tables."""
        self._gradients.drop_tasks(self.marker.never_added())
        if self.marker.was_dropped:
            self.drop()
        if self._gradients:
            raise RuntimeError(
                "Gradients are held for these tables: call step() or zero_grad() before the tables "
                "are moved, loaded or given to an optimizer."
            )
