"""Counters and memory of a table, which metrics show."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrec_hkv.backends.specs import StorageBytes


class DeviceCounters(NamedTuple):
    """Counters of the tables of a group, on their device.

    Attributes:
        keys: keys of the shards, one per row.
        names: names of the counters, one per column.
        values: int64 ``[shards, counters]``.
    """

    keys: Sequence[str]
    names: Sequence[str]
    values: torch.Tensor


class CountingLookup(abc.ABC):
    """Counts what happens in each table of a group."""

    @abc.abstractmethod
    def counters(self, key: str) -> dict[str, int]:
        """Counters of a shard since its creation, by name. Synchronizes with the GPU.

        A backend may have any counters. Metrics show those of
        :class:`torchrec_hkv.metrics.TableMetrics`, such as ``lookups``, ``hits`` and ``size``.
        """

    def device_counters(self) -> DeviceCounters | None:
        """The counters of all tables, without synchronization. None, the default, if the backend
        can't return counters without synchronization."""
        return None

    def capacity(self, key: str) -> int:
        """Maximal number of rows of a shard on this rank; 0, the default, if not applicable."""
        return 0

    def memory(self, key: str) -> StorageBytes:
        """Bytes that a shard takes on this rank now; 0 by default."""
        return StorageBytes(hbm=0, host=0)
