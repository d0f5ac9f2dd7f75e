"""Copies of a group with the contents of its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.groups.accumulation import Accumulator
from torchrec_hkv.hash_table.groups.contents import GroupContents
from torchrec_hkv.hash_table.groups.selection import GroupSelection
from torchrec_hkv.hash_table.optimizers import Optimizer

_ops = torch.ops.torchrec_hkv
#: Device memory for entries that are being copied.
_BATCH_BYTES = 64 << 20


class GroupCopies(GroupSelection, GroupContents):
    """Support of ``copy`` and refusal of ``pickle``; a base of ``TableGroup``."""

    feature_tables: tuple[int, ...]
    optimizer: Optimizer | None
    optimizer_steps: torch.Tensor
    counter_tensor: torch.Tensor
    aged_lfu: torch.Tensor
    set_clock: Callable[[int], None]
    set_epoch: Callable[[int], None]
    _accumulator: Accumulator
    _state_dim_argument: int | None
    _epoch: int
    _crowded: list[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._accumulator.is_needed:
            raise RuntimeError(
                "The tables can't be copied, because gradients are stored for them: first make the "
                "lookup that applies them."
            )
        copied = type(self)(
            self.tables, self.feature_tables, self.optimizer, self.device, self._state_dim_argument
        )
        memo[id(self)] = copied
        with self.unchanged():
            copied.set_clock(self.clock)
            copied.set_epoch(self._epoch)
            for table in range(len(self.tables)):
                self._copy_entries(copied, table)
                copied._group.load_evicted_marks(table, self._group.evicted_marks(table))
                copied._group.load_counts(table, self._group.counts(table))
                copied.fill_frames(table)
            copied.optimizer_steps.copy_(self.optimizer_steps)
            copied.counter_tensor.copy_(self.counter_tensor)
            copied.aged_lfu.copy_(self.aged_lfu)
            copied._group.miniature_counters.copy_(self._group.miniature_counters)
            for to, source in zip(
                copied._group.miniature_entries, self._group.miniature_entries, strict=True
            ):
                to.copy_(source)
            copied._crowded = list(self._crowded)
        return copied

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} has no shallow copy, because it would share its memory: use "
            "copy.deepcopy."
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} can't be pickled: write each of its tables with "
            "torchrec_hkv.hash_table.files.save, and read it with "
            "torchrec_hkv.hash_table.files.load."
        )

    def _copy_entries(self, copied: Self, table: int) -> None:
        """Copies each entry to the slot that it has here."""
        dim, dtype, width, _, buckets, bucket_slots = _C.table_layout(self._group.handle, table)
        copied.reserve_buckets(table, buckets, bucket_slots)
        slots = self.select_slots(table)
        entry_bytes = dim * dtype.itemsize + width * 4 + 28
        for part in slots.split(max(1, _BATCH_BYTES // entry_bytes)) if slots.numel() else ():
            ids, rows, last_steps, scores, states = _ops.read_slots(self._group.handle, table, part)
            place = (copied.counter_tensor, copied._group.handle, table)
            placed = _ops.restore_slots(*place, part, ids, rows, last_steps, scores, states)
            if not placed.all():
                raise RuntimeError(
                    f"table {self.tables[table].name!r} could not be copied: "
                    f"{int((~placed).sum())} of its slots are occupied twice."
                )
