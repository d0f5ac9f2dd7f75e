"""Gradients of several backwards, held on the device until a step applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.groups.accumulation import Round, slots_at_present


@dataclasses.dataclass(frozen=True)
class _Held:
    round: Round
    sizes: tuple[int, ...]  # ids of each table
    task: int | None  # of autograd's that gave it; None of several

    @property
    def bytes(self) -> int:
        held = self.round
        return sum(t.nbytes for t in (held.grad, held.ids, held.offsets, held.slots))


class GradientBuffer:
    """What backwards have given since the last step, in bounded memory.

    A backward's gradient is held as it is. Where the buffer gets too small, gradients of equal ids
    are added up; that waits for the device. The gradient that autograd itself makes is not counted.

    Args:
        limit: bytes it may take.
        group: of the tables; one feature a table, all of one dim.
        dim: of the tables.
    """

    def __init__(self, limit: int, group: TableGroup, dim: int) -> None:
        self.limit = limit
        self._group = group
        self._dim = dim
        self._held: list[_Held] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(held.bytes for held in self._held)

    def add(self, backward: Round, sizes: tuple[int, ...], task: int) -> None:
        """Holds one more.

        Args:
            backward: with one id a bag, see :class:`torchrec_hkv.nn.lookup.Found`.
            sizes: ids of each table.
            task: of autograd's that it is of.

        Raises:
            RuntimeError: there is no room; what was held is held still.
        """
        held = [*self._held, _Held(backward, sizes, task)]
        if sum(each.bytes for each in held) > self.limit:
            held = [self._added_up(held)]
            if held[0].bytes > self.limit:
                raise RuntimeError(
                    f"The gradients since the last step take {held[0].bytes / 2**30:.3g} GiB, but "
                    f"grad_buffer_hbm_gb is {self.limit / 2**30:.3g}: call step() of an HKV "
                    "optimizer over this embedding more often, or give it a larger buffer."
                )
        self._held = held

    def scale(self, factor: Tensor) -> None:
        """Multiplies all that is held."""
        for held in self._held:
            held.round.grad.mul_(factor)

    def finite(self) -> Tensor:
        """Whether all values are finite, bool ``[]`` on the device."""
        return torch.stack([held.round.grad.isfinite().all() for held in self._held]).all()

    def take(self) -> list[Round]:
        """All that is held, with slots as they are at present; nothing is held any more."""
        held, self._held = self._held, []
        return [self._present(each.round) for each in held]

    def drop_tasks(self, tasks: set[int]) -> None:
        """Forgets those of some tasks of autograd's, where they have not been added to others."""
        self._held = [held for held in self._held if held.task not in tasks]

    def drop(self) -> None:
        """Forgets all."""
        self._held = []

    def _present(self, held: Round) -> Round:
        args = (held.slots, held.growths, held.ids, held.offsets, held.batch_size)
        slots, growths = slots_at_present(self._group, *args)
        return dataclasses.replace(held, slots=slots, growths=growths)

    def _added_up(self, all_held: Sequence[_Held]) -> _Held:
        """One backward that is the sum of several."""
        rounds = [self._present(held.round) for held in all_held]
        tables = torch.cat([_tables(held) for held in all_held])
        grads = torch.cat([self._by_id(held) for held in all_held])
        ids, slots = (torch.cat([getattr(r, name) for r in rounds]) for name in ("ids", "slots"))
        kept = slots >= 0
        ids, slots, tables, grads = (t[kept] for t in (ids, slots, tables, grads))
        # Slots are numbered through the tables, so that this is in the order of tables, too.
        distinct, where = slots.unique(return_inverse=True)
        positions = torch.arange(len(ids), device=ids.device)
        first = torch.zeros_like(distinct).scatter_(0, where, positions)  # any one of equal ids
        sizes = tuple(tables[first].bincount(minlength=self._group.num_features).tolist())
        batch_size = max(sizes)
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].to(slots.device)
        of = tables[first]
        bag = torch.arange(len(distinct), device=slots.device) - starts[of]
        grad = grads.new_zeros(batch_size * len(sizes), self._dim)
        grad.index_add_(0, (bag * len(sizes) + of)[where], grads)
        summed = Round(
            grad=grad.view(batch_size, len(sizes) * self._dim),
            ids=ids[first],
            offsets=bag_offsets(sizes, slots.device),
            weights=None,
            slots=distinct,
            growths=rounds[0].growths,
            batch_size=batch_size,
            mean=False,
            pin=tuple(held.pin for held in rounds),
        )
        return _Held(summed, sizes, None)

    def _by_id(self, held: _Held) -> Tensor:
        """Gradients by position, ``[n, dim]``."""
        grad = held.round.grad.view(-1, len(held.sizes), self._dim)
        return torch.cat([grad[:size, table] for table, size in enumerate(held.sizes)])


def _tables(held: _Held) -> Tensor:
    """The table of each position."""
    sizes = torch.tensor(held.sizes)
    return torch.arange(len(sizes)).repeat_interleave(sizes).to(held.round.ids.device)


def bag_offsets(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Offsets of bags of one id, with empty ones after those of each table.

    Args:
        sizes: ids of each table.
        device: of the offsets.

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
