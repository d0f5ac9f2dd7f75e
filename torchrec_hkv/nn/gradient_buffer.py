"""Gradients of several backwards, stored on the device until a step applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.groups.accumulation import PendingGradient, current_slots


@dataclasses.dataclass(frozen=True)
class _BufferedGradient:
    pending: PendingGradient
    sizes: tuple[int, ...]  # ids of each table
    task: int | None  # id of the autograd graph task; None for a sum of several

    @property
    def bytes(self) -> int:
        pending = self.pending
        return sum(t.nbytes for t in (pending.grad, pending.ids, pending.offsets, pending.slots))


class GradientBuffer:
    """The gradients of the backwards since the last step, in bounded memory.

    The gradient of each backward is stored unchanged. If the buffer is full, gradients of equal ids
    are summed, which synchronizes with the device. The limit does not include the gradient tensor
    that autograd itself allocates.

    Args:
        limit: maximal bytes of the buffer.
        group: group of the tables; each table has one feature, and all have the same dim.
        dim: number of columns of the tables.
    """

    def __init__(self, limit: int, group: TableGroup, dim: int) -> None:
        self.limit = limit
        self._group = group
        self._dim = dim
        self._buffered: list[_BufferedGradient] = []

    def __bool__(self) -> bool:
        return bool(self._buffered)

    @property
    def bytes(self) -> int:
        """Bytes of the stored gradients."""
        return sum(gradient.bytes for gradient in self._buffered)

    def add(self, backward: PendingGradient, sizes: tuple[int, ...], task: int) -> None:
        """Stores a gradient.

        Args:
            backward: the gradient, with one id in each bag, see
                :class:`torchrec_hkv.nn.lookup.SlotLookup`.
            sizes: number of ids of each table.
            task: id of the autograd graph task.

        Raises:
            RuntimeError: the buffer is full. The gradients stored before are kept.
        """
        buffered = [*self._buffered, _BufferedGradient(backward, sizes, task)]
        if sum(each.bytes for each in buffered) > self.limit:
            buffered = [self._summed(buffered)]
            if buffered[0].bytes > self.limit:
                raise RuntimeError(
                    f"The gradients since the last step take {buffered[0].bytes / 2**30:.3g} GiB, "
                    f"but grad_buffer_hbm_gb is {self.limit / 2**30:.3g}: call step() of an HKV "
                    "optimizer over this embedding more often, or give it a larger buffer."
                )
        self._buffered = buffered

    def scale(self, factor: Tensor) -> None:
        """Multiplies all stored gradients by a factor."""
        for gradient in self._buffered:
            gradient.pending.grad.mul_(factor)

    def finite(self) -> Tensor:
        """Whether all stored values are finite, bool ``[]`` on the device."""
        return torch.stack(
            [gradient.pending.grad.isfinite().all() for gradient in self._buffered]
        ).all()

    def take(self) -> list[PendingGradient]:
        """Removes and returns all stored gradients, with current slots."""
        buffered, self._buffered = self._buffered, []
        return [self._with_current_slots(each.pending) for each in buffered]

    def drop_tasks(self, tasks: set[int]) -> None:
        """Drops gradients of some autograd graph tasks, unless they are part of a sum."""
        self._buffered = [gradient for gradient in self._buffered if gradient.task not in tasks]

    def drop(self) -> None:
        """Drops all gradients."""
        self._buffered = []

    def _with_current_slots(self, pending: PendingGradient) -> PendingGradient:
        args = (pending.slots, pending.growths, pending.ids, pending.offsets, pending.batch_size)
        slots, growths = current_slots(self._group, *args)
        return dataclasses.replace(pending, slots=slots, growths=growths)

    def _summed(self, all_buffered: Sequence[_BufferedGradient]) -> _BufferedGradient:
        """Sums several gradients into one."""
        rounds = [self._with_current_slots(gradient.pending) for gradient in all_buffered]
        tables = torch.cat([_tables(gradient) for gradient in all_buffered])
        grads = torch.cat([self._by_id(gradient) for gradient in all_buffered])
        ids, slots = (torch.cat([getattr(r, name) for r in rounds]) for name in ("ids", "slots"))
        present = slots >= 0
        ids, slots, tables, grads = (t[present] for t in (ids, slots, tables, grads))
        # Slots are numbered consecutively over the tables, so sorted slots are sorted by table.
        distinct, where = slots.unique(return_inverse=True)
        positions = torch.arange(len(ids), device=ids.device)
        first = torch.zeros_like(distinct).scatter_(0, where, positions)  # any position of the id
        sizes = tuple(tables[first].bincount(minlength=self._group.num_features).tolist())
        batch_size = max(sizes)
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].to(slots.device)
        table_of_id = tables[first]
        bag = torch.arange(len(distinct), device=slots.device) - starts[table_of_id]
        grad = grads.new_zeros(batch_size * len(sizes), self._dim)
        grad.index_add_(0, (bag * len(sizes) + table_of_id)[where], grads)
        summed = PendingGradient(
            grad=grad.view(batch_size, len(sizes) * self._dim),
            ids=ids[first],
            offsets=bag_offsets(sizes, slots.device),
            weights=None,
            slots=distinct,
            growths=rounds[0].growths,
            batch_size=batch_size,
            mean=False,
            pin=tuple(gradient.pin for gradient in rounds),
        )
        return _BufferedGradient(summed, sizes, None)

    def _by_id(self, gradient: _BufferedGradient) -> Tensor:
        """Gradients in the order of the ids, ``[n, dim]``."""
        grad = gradient.pending.grad.view(-1, len(gradient.sizes), self._dim)
        return torch.cat([grad[:size, table] for table, size in enumerate(gradient.sizes)])


def _tables(gradient: _BufferedGradient) -> Tensor:
    """The table of each id."""
    sizes = torch.tensor(gradient.sizes)
    return torch.arange(len(sizes)).repeat_interleave(sizes).to(gradient.pending.ids.device)


def bag_offsets(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Offsets of bags with one id each. Empty bags pad each table to the largest number of ids.

    Args:
        sizes: number of ids of each table.
        device: device of the offsets.

    Returns:
        int64 ``[len(sizes) * max(sizes) + 1]``.
    """
    if len(set(sizes)) == 1:
        return torch.arange(len(sizes) * sizes[0] + 1, device=device)
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    bags = torch.arange(int(counts.max()))
    offsets = starts.unsqueeze(1) + torch.minimum(bags, counts.unsqueeze(1))
    return torch.cat([offsets.flatten(), counts.sum(0, keepdim=True)]).to(device)
