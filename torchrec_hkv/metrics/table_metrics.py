"""The metrics of one table."""

from __future__ import annotations

import dataclasses

from torchrec_hkv.hash_table.groups.counters import MINIATURE_CS


@dataclasses.dataclass(frozen=True)
class TableMetrics:
    """Counters of a table. Counters of several ranks and tables can be added.

    Attributes:
        lookups: ids in training lookups and insertions.
        hits: lookups whose id was in the table.
        inserted: ids that were inserted.
        evicted: ids that were evicted.
        refused: ids for which no slot was found.
        unadmitted: ids that were not admitted.
        expired: ids that were removed because of their age.
        fetched: rows copied from host memory to HBM.
        written_back: rows copied from HBM back to host memory.
        host_hits: hits whose row was in host memory; on a CPU all hits.
        returned: ids that were inserted again after an eviction, in tables with
            ``remember_evicted``.
        size: ids in the table.
        aged: number of shards with aging counts (``AgedLFU`` or ``"adaptive"``).
        c_hundredths: sum of their half-lives c, in hundredths.
        miniature_lookups: recent lookups in the miniature tables of an adaptive table.
        miniature_hits_0: recent hits of the miniature table with c = 0, LRU.
        miniature_hits_1: recent hits with c = 1.
        miniature_hits_2: recent hits with c = 2.
        miniature_hits_4: recent hits with c = 4.
        miniature_hits_16: recent hits with c = 16.
        capacity: maximal number of ids.
        hbm_bytes: bytes in GPUs' memory, including the index.
        host_bytes: bytes in host memory.
    """

    lookups: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    refused: int = 0
    unadmitted: int = 0
    expired: int = 0
    fetched: int = 0
    written_back: int = 0
    host_hits: int = 0
    returned: int = 0
    size: int = 0
    aged: int = 0
    c_hundredths: int = 0
    miniature_lookups: int = 0
    miniature_hits_0: int = 0
    miniature_hits_1: int = 0
    miniature_hits_2: int = 0
    miniature_hits_4: int = 0
    miniature_hits_16: int = 0
    capacity: int = 0
    hbm_bytes: int = 0
    host_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of lookups that are hits; NaN without lookups."""
        return self.hits / self.lookups if self.lookups else float("nan")

    @property
    def hbm_hit_rate(self) -> float:
        """Share of lookups whose row was in HBM; NaN without lookups."""
        return (self.hits - self.host_hits) / self.lookups if self.lookups else float("nan")

    @property
    def host_hit_rate(self) -> float:
        """Share of lookups whose row was in host memory; NaN without lookups."""
        return self.host_hits / self.lookups if self.lookups else float("nan")

    @property
    def load_factor(self) -> float:
        """Share of slots in use; NaN without slots."""
        return self.size / self.capacity if self.capacity else float("nan")

    @property
    def c(self) -> float:
        """The half-life c of counts, see :class:`torchrec_hkv.AgedLFU`: the mean over shards; NaN
        under policies without one."""
        return self.c_hundredths / 100 / self.aged if self.aged else float("nan")

    @property
    def miniature_hit_rates(self) -> dict[float, float]:
        """Recent hit rates of an adaptive table's miniature tables by their c; ``{}`` without
        lookups."""
        if not self.miniature_lookups:
            return {}
        hits = {c: getattr(self, f"miniature_hits_{c:g}") for c in MINIATURE_CS}
        return {c: count / self.miniature_lookups for c, count in hits.items()}

    def __add__(self, other: TableMetrics) -> TableMetrics:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return TableMetrics(*(a + b for a, b in zip(mine, others, strict=True)))

    def since(self, before: TableMetrics) -> TableMetrics:
        """Counts since an earlier reading; size, capacity and bytes at this reading.

        Counts of a module's tables restart when it is moved, loaded or given to an optimizer. Then
        it is the counts since that time.
        """
        if any(getattr(self, name) < getattr(before, name) for name in COUNTED):
            before = TableMetrics()
        return dataclasses.replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in COUNTED}
        )


#: Fields that never decrease.
COUNTED = ("lookups", "hits", "inserted", "evicted", "refused", "unadmitted", "expired")
COUNTED += ("fetched", "written_back", "host_hits", "returned")
