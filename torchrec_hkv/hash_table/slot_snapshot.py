"""What the slots of a table held at one moment, to be compared with what they hold later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_hkv.hash_table.groups.table_group import TableGroup

_ops = torch.ops.torchrec_hkv
_LEAST_STEP = -(1 << 31)
#: Bytes a slot that a comparison takes: owners, ids and steps of now and before, and comparisons.
COMPARE_BYTES = 48
#: Slots that a CPU compares at a time: what they take stays in its caches.
_CPU_SLOTS = 1 << 17


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs in some consecutive slots; tensors are on the table's device.

    Attributes:
        entries: that the slots hold now.
        slots: int64, ascending: those whose entries changed or are new.
        ids: int64, of the entries there.
        touched: bool, whether the entry was looked up or changed, and did not just move.
        stayed: bool, whether the slot held the same id before.
        gone_slots: int64, ascending: those that held another id before.
        gone_ids: int64, these ids. An id may be in another slot now.
    """

    entries: int
    slots: Tensor
    ids: Tensor
    touched: Tensor
    stayed: Tensor
    gone_slots: Tensor
    gone_ids: Tensor


class SlotSnapshot:
    """The id of each slot at one moment; 9 bytes of host memory a slot.

    Slots are counted from the table's first.

    Args:
        group: the table's.
        table: its index there.
    """

    def __init__(self, group: TableGroup, table: int) -> None:
        self._group, self._table = group, table
        self.ids = torch.empty(0, dtype=torch.int64)
        self.occupied = torch.empty(0, dtype=torch.bool)

    def resize(self, *, keep: bool) -> None:
        """Makes room for the slots that the table has now; further ones were free before."""
        slots = self._group.present_slots(self._table)
        if slots == len(self.ids):
            return
        pin = self._group.device.type == "cuda"  # a GPU copies from it without help
        ids = torch.zeros(slots, dtype=torch.int64, pin_memory=pin)
        occupied = torch.zeros(slots, dtype=torch.bool, pin_memory=pin)
        if keep:
            ids[: len(self.ids)] = self.ids
            occupied[: len(self.ids)] = self.occupied
        self.ids, self.occupied = ids, occupied

    def take(self, batch: int) -> None:
        """Notes what all slots hold now.

        Args:
            batch: slots to look at at a time.
        """
        self.resize(keep=False)
        for own in self._ranges(batch):
            self.ids[own], _, self.occupied[own] = self._now(own)

    def compare(
        self, since: int, batch: int, changed: Tensor | None = None
    ) -> Iterator[Difference]:
        """Compares, and notes what the slots hold now.

        Args:
            since: entries that were looked up in this step or later count as changed.
            batch: slots to look at at a time.
            changed: int64, in host memory: slots of further entries that changed.
        """
        self.resize(keep=True)
        marked = torch.zeros(0, dtype=torch.bool)
        if changed is not None and changed.numel():
            marked = torch.zeros(len(self.ids), dtype=torch.bool)
            marked[changed] = True
        for own in self._ranges(batch):
            ids, steps, is_there = self._now(own)
            before = self.ids[own].to(ids.device, non_blocking=True)
            was_there = self.occupied[own].to(ids.device, non_blocking=True)
            other = (ids != before) & was_there & is_there | (was_there != is_there)
            # Unsigned steps as signed numbers of the same order.
            touched = steps.bitwise_xor_(_LEAST_STEP) >= since + _LEAST_STEP
            if len(marked):
                touched |= marked[own].to(ids.device)
            differs = true_places(is_there & touched | other)
            there, was = is_there[differs], was_there[differs]
            other, touched = other[differs], touched[differs]
            now, gone = differs[there], differs[was & other]
            yield Difference(
                int(is_there.count_nonzero()),
                now + own.start,
                ids[now],
                touched[there],
                ~other[there],
                gone + own.start,
                before[gone],
            )
            new = differs[other]
            self.ids[own][new.cpu()] = ids[new].cpu()
            self.occupied[own] = is_there.cpu()

    def note(self, slots: Tensor, ids: Tensor | None) -> None:
        """Notes what some slots hold now.

        Args:
            slots: int64.
            ids: int64, of the entries there; None where the slots are free.
        """
        at = slots.cpu()
        self.occupied[at] = ids is not None
        if ids is not None:
            self.ids[at] = ids.cpu()

    def _ranges(self, batch: int) -> Iterator[slice]:
        if self._group.device.type == "cpu":
            batch = min(batch, _CPU_SLOTS)
        for first in range(0, len(self.ids), batch):
            yield slice(first, min(first + batch, len(self.ids)))

    def _now(self, own: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, the bits of last steps, and whether there is an entry, of some slots; on the
        table's device."""
        group, table = self._group, self._table
        slots = torch.arange(own.start, own.stop, device=group.device)
        ids, steps = group.ids_and_steps(table, slots)
        n = own.stop - own.start
        owners = _ops.slot_owners(group.counter_tensor, group.handle, table, own.start, n)
        return ids, steps, owners >= 0


def true_places(mask: Tensor) -> Tensor:
    """As ``mask.nonzero().flatten()``, in less time where few are true.

    Args:
        mask: bool ``[n]``.
    """
    whole = len(mask) // 8 * 8
    words = mask[:whole].view(torch.int64).nonzero()  # eight places each
    places = (words * 8 + torch.arange(8, device=mask.device)).flatten()
    if whole < len(mask):
        places = torch.cat([places, torch.arange(whole, len(mask), device=mask.device)])
    return places[mask[places]]
