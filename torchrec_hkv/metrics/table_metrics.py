"""The metrics of one table."""

from __future__ import annotations

import dataclasses

from torchrec_hkv.hash_table.groups.counters import MINIATURE_CS


@dataclasses.dataclass(frozen=True)
class TableMetrics:
    """Counts of a table, over all ranks where several hold it. They add up.

    Attributes:
        lookups: ids of training lookups and insertions.
        hits: of these, ids that were there.
        inserted: ids that got a slot.
        evicted: ids that left for others.
        refused: ids for which there was no place.
        unadmitted: ids that were not admitted.
        expired: ids that left for their age.
        fetched: rows that came from host memory into a GPU's.
        written_home: rows that went back because others took their place.
        host_hits: hits whose row was in host memory; on a CPU all of them.
        returned: ids that got a slot after they had been evicted, of a table with
            ``remember_evicted``.
        size: ids in the table.
        aged: 1 where counts age, that is under ``AgedLFU`` or ``"adaptive"``; so many shards.
        c_hundredths: of these, the sum of c in hundredths.
        miniature_lookups: ids that the miniatures of an adaptive table have looked up lately; so
            the next.
        miniature_hits_0: hits of the miniature with c = 0, LRU.
        miniature_hits_1: with c = 1.
        miniature_hits_2: with c = 2.
        miniature_hits_4: with c = 4.
        miniature_hits_16: with c = 16.
        capacity: ids it may hold.
        hbm_bytes: what it takes of GPUs' memory, index included.
        host_bytes: what it takes of host memory.
    """

    lookups: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    refused: int = 0
    unadmitted: int = 0
    expired: int = 0
    fetched: int = 0
    written_home: int = 0
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
        """Share of the lookups whose id was there; NaN without any."""
        return self.hits / self.lookups if self.lookups else float("nan")

    @property
    def hbm_hit_rate(self) -> float:
        """Share of the lookups whose row was in a GPU's memory; NaN without any."""
        return (self.hits - self.host_hits) / self.lookups if self.lookups else float("nan")

    @property
    def host_hit_rate(self) -> float:
        """Share of the lookups whose row was in host memory; NaN without any."""
        return self.host_hits / self.lookups if self.lookups else float("nan")

    @property
    def load_factor(self) -> float:
        """Share of the slots that are taken; NaN without any."""
        return self.size / self.capacity if self.capacity else float("nan")

    @property
    def c(self) -> float:
        """The half-life of counts in use, as ``AgedLFU`` has it: the mean of the shards; NaN under
        policies that have none."""
        return self.c_hundredths / 100 / self.aged if self.aged else float("nan")

    @property
    def miniature_hit_rates(self) -> dict[float, float]:
        """Hit rates of the miniatures of an adaptive table lately, by their c; {} without any."""
        if not self.miniature_lookups:
            return {}
        hits = {c: getattr(self, f"miniature_hits_{c:g}") for c in MINIATURE_CS}
        return {c: its / self.miniature_lookups for c, its in hits.items()}

    def __add__(self, other: TableMetrics) -> TableMetrics:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return TableMetrics(*(a + b for a, b in zip(mine, others, strict=True)))

    def since(self, before: TableMetrics) -> TableMetrics:
        """Counts since another time; size, capacity and bytes as they are now."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) - getattr(before, name) for name in COUNTED}
        )


#: Fields that only grow.
COUNTED = ("lookups", "hits", "inserted", "evicted", "refused", "unadmitted", "expired")
COUNTED += ("fetched", "written_home", "host_hits", "returned")
