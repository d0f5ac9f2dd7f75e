"""How many rows tables may hold, from what a user allows and what memory there is."""

from __future__ import annotations

import dataclasses
import math

import torch

from torchrec_hkv.hash_table import EvictionPolicy, TableMemory, gpu_table_bytes, table_memory
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory

GIB = 1 << 30
# What the tables may take of the memory that is free.
_SHARE = 0.9


def gib_to_bytes(what: str, size: float | None) -> int | None:
    """Bytes of a number of GiB.

    Raises:
        ValueError: it is neither None nor a positive finite number.
    """
    if size is None:
        return None
    is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if not is_number or not 0 < size < math.inf:
        raise ValueError(f"{what} is {size!r}, but must be None or a positive number of GiB.")
    return int(size * GIB)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free now: of the GPU's memory, 0 on a CPU, and of host memory."""
    return gpu_memory(device)[0] if device.type == "cuda" else 0, host_memory()[0]


@dataclasses.dataclass(frozen=True)
class HbmLimits:
    """What one table may take of a GPU's memory.

    Rows and optimizer states share slots and, but for narrow states, go from one memory to the
    other together: so where both limits are given, the two together are within their sum.

    Attributes:
        rows: bytes of index and rows, None for no limit.
        states: bytes of optimizer states; None: they count as rows.
    """

    rows: int | None = None
    states: int | None = None

    def hbm_bytes(self, memory: TableMemory, state_width: int) -> int | None:
        """Of a table, index included; None for no limit."""
        if self.states is None or state_width == 0:
            return self.rows
        if self.rows is not None:
            return self.rows + self.states
        return memory.index_bytes + self.states // (4 * state_width) * memory.row_bytes


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tables of one shape.

    Attributes:
        tables: how many.
        dim: of their rows.
        state_width: float32 values of optimizer state a row.
        eviction: their policy.
        limits: of each.
        device: of all.
        initial_capacity: rows that each has memory for at first, which tells how it is rounded.
        remember_evicted: evicted ids that each remembers.
    """

    tables: int
    dim: int
    state_width: int
    eviction: EvictionPolicy
    limits: HbmLimits
    device: torch.device
    initial_capacity: int
    remember_evicted: int | None = None

    def memory(self, capacity: int) -> TableMemory:
        """Of one table."""
        first = min(capacity, self.initial_capacity)
        return table_memory(
            capacity,
            self.dim,
            self.state_width,
            self.eviction,
            initial_capacity=first,
            remember_evicted=self.remember_evicted,
        )

    def hbm_bytes(self, capacity: int) -> int | None:
        """What one table may take of a GPU's memory; None: all that it needs."""
        return self.limits.hbm_bytes(self.memory(capacity), self.state_width)

    def most_rows(self, capacity: int, hbm_free: int, host_free: int) -> int:
        """Rows that each can hold, at most ``capacity``; 0 where not even one fits.

        Args:
            capacity: rows asked for.
            hbm_free: bytes of the GPU's memory, of which all together may take nine tenths.
            host_free: the same of host memory.
        """
        on_gpu = self.device.type == "cuda"
        hbm, host = _SHARE * hbm_free, _SHARE * host_free

        def fits(rows: int) -> bool:
            memory = self.memory(rows)
            if not on_gpu:
                return self.tables * memory.bytes <= host
            limit = self.limits.hbm_bytes(memory, self.state_width)
            if limit is not None and memory.least_hbm_bytes > limit:
                return False
            in_hbm, on_host = gpu_table_bytes(memory, limit)
            return self.tables * in_hbm <= hbm and self.tables * on_host <= host

        if fits(capacity):
            return capacity
        low, high = 0, capacity  # the first fits, or is 0; the last does not
        while high - low > max(1, low >> 10):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
