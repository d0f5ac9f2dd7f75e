"""The metrics of one table."""

from __future__ import annotations

import dataclasses


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
