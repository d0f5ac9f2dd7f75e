"""Counters, sizes and memory of the tables of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.table_spec import TableSpec

#: Columns of :meth:`GroupCounters.device_counters`.
DEVICE_COUNTS = ("lookups", "hits", "inserted", "evicted", "refused", "unadmitted")
DEVICE_COUNTS += ("expired", "fetched", "written_back", "host_hits", "returned", "size")
_COUNTED = DEVICE_COUNTS[:-1]
#: Half-lives c of the miniature tables of an adaptive table, see ``AgedLFU``.
MINIATURE_CS = _C.MINIATURES
#: Further columns, for tables with aging counts: 1, c in hundredths (at most 10^8), and recent
#: counts of the miniature tables.
DEVICE_COUNTS += ("aged", "c_hundredths", "miniature_lookups")
DEVICE_COUNTS += tuple(f"miniature_hits_{c:g}" for c in MINIATURE_CS)
#: Columns of the counters that kernels write.
COUNTERS = (
    "lookups",
    "misses",
    "inserted",
    "evicted",
    "refused",
    "unadmitted",
    "expired",
    "fetched",
    "written_back",
    "crowded",
    "host_hits",
    "returned",
)


class GroupCounters:
    """Counters of a group; a base of ``TableGroup``."""

    tables: tuple[TableSpec, ...]
    device: torch.device
    _group: _C.TableGroup

    def _count_hits_by_memory(self, configs: Sequence[_C.TableConfig]) -> None:
        self._all_on_host = torch.tensor(
            [self.device.type == "cpu" or config.hbm_slots == 0 for config in configs],
            device=self.device,
        )
        aged = [config.eviction == _C.Eviction.AGED_LFU for config in configs]
        self._aged = torch.tensor(aged, device=self.device).long().unsqueeze(1)

    @property
    def counter_tensor(self) -> Tensor:
        """int64 ``[tables, 12]`` on the device; written by ops that change a table."""
        return self._group.counters

    def sizes(self) -> list[int]:
        """Number of entries of each table. Synchronizes with the device."""
        return self._group.sizes().tolist()

    def counters(self) -> list[dict[str, int]]:
        """For each table, counts since its creation, its size and its full capacity in slots.
        Synchronizes with the device.

        - ``lookups``: ids in training lookups and insertions.
        - ``hits``: lookups whose id was in the table.
        - ``inserted``: ids that got a slot.
        - ``evicted``: ids that were evicted.
        - ``refused``: ids for which no slot was found.
        - ``unadmitted``: ids that were not admitted.
        - ``expired``: entries that were removed because of their age.
        - ``fetched``: rows copied from host memory to HBM.
        - ``written_back``: rows that were changed in HBM and written back to host memory.
        - ``host_hits``: hits whose row was in host memory; on a CPU all hits.
        - ``returned``: inserted ids that the table remembers as evicted; 0 without
          ``remember_evicted``.

        Raises:
            ValueError: see :meth:`TableGroup.check_offsets`.
        """
        # Read sizes first: this also waits for calls on other streams.
        sizes = self._group.sizes().tolist()
        counts = self._counts().tolist()
        self._group.check_offsets()
        capacities = map(self._group.full_slots, range(len(self.tables)))
        return [
            {**dict(zip(_COUNTED, count, strict=True)), "size": size, "capacity": slots}
            for count, size, slots in zip(counts, sizes, capacities, strict=True)
        ]

    def device_counters(self) -> Tensor:
        """:data:`DEVICE_COUNTS` of each table, int64 ``[tables, 20]`` on the device. Does not
        synchronize."""
        sizes = self._group.sizes().to(self.device)  # first, as it orders other streams
        hundredths = (self._group.aged_lfu[:, :1] * 100).clamp(max=1e8).long()
        tally, k = self._group.miniature_counters, len(MINIATURE_CS)
        recent = tally[:, : k + 1] + tally[:, k + 1 : 2 * k + 2]  # hits, and lookups
        parts = [self._counts(), sizes.unsqueeze(1), self._aged * 1, self._aged * hundredths]
        return torch.cat([*parts, recent[:, k:], recent[:, :k]], dim=1)

    def _counts(self) -> Tensor:
        """Counts since the creation of the tables."""
        counted = dict(zip(COUNTERS, self._group.counters.unbind(1), strict=True))
        counted["hits"] = counted["lookups"] - counted["misses"]
        # Kernels count hits in host memory only if there are frames in HBM. Without frames, all
        # rows of a table are in one memory.
        counted["host_hits"] = torch.where(self._all_on_host, counted["hits"], counted["host_hits"])
        return torch.stack([counted[name] for name in _COUNTED], dim=1)

    def hbm_bytes(self, table: int) -> int:
        """Bytes of GPU memory that a table takes."""
        return self._group.hbm_bytes(table)

    def host_bytes(self, table: int) -> int:
        """Bytes of host memory that a table takes."""
        return self._group.host_bytes(table)
