"""Half-lives of counts in a sampled table, equal to those in the whole table.

A half-life is a number of lookups. A sample has more or fewer lookups than its share, depending on
whether it contains the most frequent ids. The half-life is therefore computed from the lookups of
all ids. ``"adaptive"`` chooses c by miniature tables, which would be too small in a sampled table.
They therefore have the same size as in the whole table, and get all ids.
"""

from __future__ import annotations

from torchrec_hkv import _C
from torchrec_hkv.hash_table import AgedLFU, EvictionPolicy, table_memory


def full_table_aging(eviction: EvictionPolicy, rows: int) -> _C.SampledAging:
    """The half-life of a whole table.

    Args:
        eviction: policy of the table, an :class:`AgedLFU` or ``"adaptive"``.
        rows: rows of the table.
    """
    slots = table_memory(rows, 1, 0, eviction).num_slots
    return _C.SampledAging(slots, eviction.c if isinstance(eviction, AgedLFU) else None)
