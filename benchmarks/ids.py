"""Ids for benchmarks of one table: new ids, and ids in the table."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv import HashTable

_PRIME = 2654435761  # exceeds all numbers of slots n, so that multiples mod n are a permutation


def hashed(numbers: Tensor) -> Tensor:
    """Maps ids 0, 1, … to ids that are spread over int64, by a bijection."""
    x = numbers * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return x ^ (x >> 32)


def power_law(n: int, ranks: int, power: float, device: torch.device) -> Tensor:
    """Draws ranks 0, 1, … with probabilities about proportional to ``(rank + 1) ** -power``.

    Args:
        n: number of draws.
        ranks: number of ranks.
        power: exponent, above 0 and not 1.
        device: device of the result.

    Returns:
        int64 ``[n]``.
    """
    unit = torch.rand(n, dtype=torch.float64, device=device)
    top = (ranks + 1.0) ** (1 - power)
    drawn = (1 + unit * (top - 1)) ** (1 / (1 - power)) - 1
    return drawn.long().clamp_(0, ranks - 1)


class IdPool:
    """Ids for calls on one table.

    Args:
        table: the table.
        power: 0 draws uniformly from the ids in the table; otherwise the exponent of a power law,
            whose ranks do not depend on the ids' slots.
    """

    def __init__(self, table: HashTable, power: float = 0.0) -> None:
        self.table = table
        self.power = power
        self._given = 0
        self._last_new: Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64)

    def _new(self, n: int) -> Tensor:
        first, self._given = self._given, self._given + n
        return hashed(torch.arange(first, self._given, device=self.table.device))

    def fill(self, load: float) -> None:
        """Inserts new ids up to a load factor; for 1, until all old ids have left."""
        capacity = self.table.capacity
        missing = int(load * capacity) - self.table.size
        if load >= 1:
            missing += capacity // 2
        while missing > 0:
            n = min(missing, 1 << 20)
            self.table.find_or_insert_slots(self._new(n))
            missing -= n
        self._slots = self.table._group.select_slots(0)

    def present(self, n: int) -> Tensor:
        """Draws ids in the table, from slots that were occupied after :meth:`fill`.

        Returns:
            int64 ``[n]``.
        """
        device, slots = self.table.device, self._slots
        if self.power:
            drawn = power_law(n, len(slots), self.power, device) * _PRIME % len(slots)
        else:
            drawn = torch.randint(len(slots), (n,), device=device)
        return self._ids_in(slots[drawn])

    def all(self) -> Tensor:
        """Returns the ids of all slots that were occupied after :meth:`fill`, int64."""
        return self._ids_in(self._slots)

    def _ids_in(self, slots: Tensor) -> Tensor:
        handle = self.table._group.handle
        # In parts, because the export includes rows.
        parts = slots.split(1 << 17) if slots.numel() else ()
        ids = [torch.ops.torchrec_hkv.export_slots(handle, part)[0] for part in parts]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=slots.device), *ids])

    def mixed(self, n: int, present: float) -> Tensor:
        """Returns shuffled ids for a call: this share is in the table, the others are new."""
        old = round(present * n)
        self._last_new = self._new(n - old)
        ids = torch.cat([self.present(old), self._last_new])
        return ids[torch.randperm(n, device=ids.device)]

    def forget(self) -> Tensor:
        """Erases the new ids of the last :meth:`mixed` call, to restore the load factor.

        Returns:
            The erased ids.
        """
        new = self._last_new
        if new is None:
            raise RuntimeError("forget() takes back a mixed() call, and there was none.")
        if new.numel():
            self.table.erase(new)
        return new
