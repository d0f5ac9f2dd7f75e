"""Aging counts of a group's tables: their half-lives, and what is measured to choose them."""

from __future__ import annotations

from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import name_of
from torchrec_hkv.hash_table.groups.counters import COUNTERS
from torchrec_hkv.hash_table.table_spec import TableSpec


class GroupAging:
    """Aging of the tables under ``AgedLFU`` and ``"adaptive"``; a base of ``TableGroup``."""

    tables: tuple[TableSpec, ...]
    clock: int
    counter_tensor: Tensor
    _group: _C.TableGroup

    @property
    def aged_lfu(self) -> Tensor:
        """Measurements of tables under :class:`AgedLFU`, float64 ``[tables, 7]`` on the device: c,
        the number of lookups in the measured calls, the number of these calls, and four more
        values. Zeros under other policies."""
        return self._group.aged_lfu

    @property
    def miniature_counters(self) -> Tensor:
        """Counts of the miniature tables of ``"adaptive"`` tables, int64 ``[tables, 14]`` on the
        device (``csrc/hash_table/miniatures.h``)."""
        return self._group.miniature_counters

    def measured_aging(self, table: int) -> tuple[float, float, float] | None:
        """The measurements that determine the half-life under :class:`AgedLFU` or ``"adaptive"``:
        the number of lookups in the measured calls, the number of these calls, and c (at most
        1e300). None under other policies. Synchronizes with the device."""
        if name_of(self.tables[table].eviction) != "aged_lfu":
            return None
        c, lookups, steps, seen_lookups, seen_step, *_ = self.aged_lfu[table].tolist()
        if seen_step >= 0:
            counted = int(self.counter_tensor[table, COUNTERS.index("lookups")])
            lookups += counted - seen_lookups
            steps += self.clock + 1 - seen_step
        return lookups, steps, min(c, 1e300)

    def restart_aging(self, table: int, measured: tuple[float, float, float] | None) -> None:
        """Continues a table from the :meth:`measured_aging` of another, or from nothing (None).
        Only tables that choose c themselves use the measured c."""
        self._group.restart_aging(table, *(measured or (0.0, 0.0, -1.0)))

    def set_aging(self, table: int, c: float) -> None:
        """Sets the c of a table under :class:`AgedLFU` for later calls. Does not synchronize.

        Raises:
            ValueError: ``c`` is less than 0, or the table has another policy.
        """
        self._group.set_aging(table, c)
