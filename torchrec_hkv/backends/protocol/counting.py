"""Counters and memory of a table, which metrics show."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from torchrec_hkv.backends.specs import StorageBytes


class CountingLookup(abc.ABC):
    """Counts what happens in each table of a group."""

    @abc.abstractmethod
    def counters(self, key: str) -> dict[str, int]:
        """Counters of a shard since its creation, by name. Synchronizes with the GPU.

        Hash tables return ``lookups``, ``hits``, ``inserted``, ``evicted``, ``refused``,
        ``unadmitted``, ``expired``, ``fetched``, ``written_home``, ``host_hits``, ``returned``,
        ``size`` and ``capacity``.
        """

    def device_counters(self) -> tuple[Sequence[str], torch.Tensor] | None:
        """The counters of all tables, without synchronization; None, the default, if the backend
        can't return them so.

        Returns:
            Shard keys, and int64 ``[tables, 12]`` on the tables' device: ``lookups``, ``hits``,
            ``inserted``, ``evicted``, ``refused``, ``unadmitted``, ``expired``, ``fetched``,
            ``written_home``, ``host_hits``, ``returned``, ``size``. More columns may follow, named
            by :data:`torchrec_hkv.hash_table.groups.counters.DEVICE_COUNTS`.
        """
        return None

    def capacity(self, key: str) -> int:
        """Maximal number of rows of a shard on this rank; 0, the default, if not applicable."""
        return 0

    def memory(self, key: str) -> StorageBytes:
        """Bytes that a shard takes on this rank now; 0 by default."""
        return StorageBytes(hbm=0, host=0)
