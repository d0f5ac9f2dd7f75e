"""Half-lives of counts in a sample, as in the table that the sample stands for.

A half-life is a number of lookups, of which a sample has more or less than its share by whether it
has the most frequent ids. And ``"adaptive"`` chooses its c by miniature tables, which in a table of
a sample would be too small to choose alike. So the half-life follows from all lookups, and c from
miniatures of the whole table's size that see all ids, as they do in that table.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, EvictionPolicy, TableGroup, table_memory
from torchrec_hkv.hash_table.groups.counters import COUNTERS

_EVICTED = COUNTERS.index("evicted")
#: Ratio by which the half-life of a sampled table may differ.
_NEAR = 1.002


class SampledAging:
    """The half-life of a sampled table.

    Args:
        group: of the table, which has an :class:`AgedLFU`.
        table: its index.
        eviction: the policy that it stands for, an :class:`AgedLFU` or ``"adaptive"``.
        rows: of the whole table.
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
        """Shows the miniatures what the whole table looks up.

        Args:
            ids: int64 ``[n]``, all ids of the step.
        """
        self._evicts = self._evicts or int(self._counters[_EVICTED]) != 0
        self._whole.end_call(ids, self._evicts)
