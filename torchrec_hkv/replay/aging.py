"""Half-lives of counts in a sampled table, equal to those in the whole table.

A half-life is a number of lookups. A sample has more or fewer lookups than its share, depending on
whether it contains the most frequent ids. And ``"adaptive"`` chooses c by miniature tables, which
would be too small in a sampled table. So the half-life follows from the lookups of all ids, and c
from miniatures that have the size they have in the whole table and see all ids.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, EvictionPolicy, TableGroup, table_memory
from torchrec_hkv.hash_table.groups.counters import COUNTERS

_EVICTED = COUNTERS.index("evicted")
#: Largest ratio by which the half-life of a sampled table may differ.
_NEAR = 1.002


class SampledAging:
    """The half-life of a sampled table.

    Args:
        group: group of the sampled table, which has an :class:`AgedLFU`.
        table: index of the table in the group.
        eviction: policy of the whole table, an :class:`AgedLFU` or ``"adaptive"``.
        rows: rows of the whole table.
    """

    def __init__(self, group: TableGroup, table: int, eviction: EvictionPolicy, rows: int) -> None:
        self._group, self._table = group, table
        own = group.tables[table]
        self._slots, slots = (
            table_memory(number, 1, 0, eviction).num_slots for number in (own.capacity, rows)
        )
        fixed = eviction.c if isinstance(eviction, AgedLFU) else None
        self._whole = _C.SampledAging(slots, fixed)
        self._state, self._counters = group.aged_lfu[table], group.counter_tensor[table]
        self._evicts = False

    def begin_step(self) -> None:
        """Sets the half-life of the next call."""
        half_life = self._whole.begin_call()
        c, lookups, steps = self._state[:3].tolist()
        if lookups == 0:
            return
        wanted = half_life * lookups / (steps * self._slots)
        if wanted != c and not c / _NEAR < wanted < c * _NEAR:
            self._group.set_aging(self._table, wanted)

    def end_step(self, ids: Tensor) -> None:
        """Passes the lookups of the whole table to the miniatures.

        Args:
            ids: int64 ``[n]``, all ids of the step.
        """
        self._evicts = self._evicts or int(self._counters[_EVICTED]) != 0
        self._whole.end_call(ids, self._evicts)
