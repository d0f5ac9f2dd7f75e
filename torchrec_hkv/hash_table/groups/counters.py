"""What the tables of a group have counted, how full they are, and the memory they take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.table_spec import TableSpec

#: What :meth:`GroupCounters.device_counters` gives of a table.
DEVICE_COUNTS = ("lookups", "hits", "inserted", "evicted", "refused", "unadmitted")
DEVICE_COUNTS += ("expired", "fetched", "written_home", "host_hits", "returned", "size")
_COUNTED = DEVICE_COUNTS[:-1]
#: Half-lives of the miniatures of an adaptive table, as an ``AgedLFU`` names them.
MINIATURE_CS = _C.MINIATURES
#: Behind these, of tables whose counts age: 1 each, c in hundredths (at most 10^8), and what their
#: miniatures have counted lately.
DEVICE_COUNTS += ("aged", "c_hundredths", "miniature_lookups")
DEVICE_COUNTS += tuple(f"miniature_hits_{c:g}" for c in MINIATURE_CS)
#: What kernels count, by column of the counters.
COUNTERS = (
    "lookups",
    "misses",
    "inserted",
    "evicted",
    "refused",
    "unadmitted",
    "expired",
    "fetched",
    "written_home",
    "crowded",
    "host_hits",
    "returned",
)


class GroupCounters:
    """Counters of a group. Part of ``TableGroup``, which has the rest."""

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
        """int64 ``[tables, 12]`` on the device; ops that change a table write it."""
        return self._group.counters

    def sizes(self) -> list[int]:
        """Entries of each table (waits for the device)."""
        return self._group.sizes().tolist()

    def counters(self) -> list[dict[str, int]]:
        """For each table, counts since it was made, its size and its full capacity in slots.

        ``lookups`` are ids of training lookups and insertions, ``hits`` those that were there,
        ``inserted`` those that were placed, ``evicted`` those in whose place they were,
        ``refused`` those that found no place, ``unadmitted`` those that were not admitted;
        ``expired`` are entries that left for their age. Of tables with rows in host memory,
        ``fetched`` are rows that came into HBM, ``written_home`` those that had changed there and
        were written to host memory when others took their place. ``host_hits`` are the hits whose
        row was in host memory (on a CPU all of them), ``returned`` the ids placed that the table
        remembers as evicted (0 without ``remember_evicted``). Waits for the device.

        Raises:
            ValueError: as :meth:`TableGroup.check_offsets` says.
        """
        # First: waits for calls on other streams too.
        sizes = self._group.sizes().tolist()
        counts = self._counts().tolist()
        self._group.check_offsets()
        capacities = map(self._group.full_slots, range(len(self.tables)))
        return [
            {**dict(zip(_COUNTED, count, strict=True)), "size": size, "capacity": slots}
            for count, size, slots in zip(counts, sizes, capacities, strict=True)
        ]

    def device_counters(self) -> Tensor:
        """:data:`DEVICE_COUNTS` of each table, int64 ``[tables, 20]`` on the device; no wait."""
        sizes = self._group.sizes().to(self.device)  # first: in order with other streams
        hundredths = (self._group.aged_lfu[:, :1] * 100).clamp(max=1e8).long()
        tally, k = self._group.miniature_tally, len(MINIATURE_CS)
        recent = tally[:, : k + 1] + tally[:, k + 1 : 2 * k + 2]  # hits, and lookups
        parts = [self._counts(), sizes.unsqueeze(1), self._aged * 1, self._aged * hundredths]
        return torch.cat([*parts, recent[:, k:], recent[:, :k]], dim=1)

    def _counts(self) -> Tensor:
        """What is counted since the tables were made."""
        counted = dict(zip(COUNTERS, self._group.counters.unbind(1), strict=True))
        counted["hits"] = counted["lookups"] - counted["misses"]
        # Kernels count hits in host memory where there are frames in HBM; elsewhere a table has all
        # its rows in one memory.
        counted["host_hits"] = torch.where(self._all_on_host, counted["hits"], counted["host_hits"])
        return torch.stack([counted[name] for name in _COUNTED], dim=1)

    def hbm_bytes(self, table: int) -> int:
        """Bytes a table takes of a GPU's memory."""
        return self._group.hbm_bytes(table)

    def host_bytes(self, table: int) -> int:
        """Bytes a table takes of host memory."""
        return self._group.host_bytes(table)
