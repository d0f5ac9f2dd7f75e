"""The number of rows that tables can hold under the user's limits and the free memory."""

from __future__ import annotations

import dataclasses
import math

import torch

from torchrec_hkv.hash_table import EvictionPolicy, TableMemory, gpu_table_bytes, table_memory
from torchrec_hkv.hash_table.available_memory import gpu_memory, host_memory

GIB = 1 << 30
# Share of the free memory that tables may take.
_SHARE = 0.9


def gib_to_bytes(what: str, size: float | None) -> int | None:
    """Converts GiB to bytes.

    Raises:
        ValueError: ``size`` is neither None nor a positive finite number.
    """
    if size is None:
        return None
    is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if not is_number or not 0 < size * GIB < math.inf:
        raise ValueError(f"{what} is {size!r}, but must be None or a positive number of GiB.")
    return int(size * GIB)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free bytes of the GPU's memory (0 on a CPU) and of host memory."""
    return gpu_memory(device)[0] if device.type == "cuda" else 0, host_memory()[0]


@dataclasses.dataclass(frozen=True)
class HbmLimits:
    """Limits of one table's GPU memory.

    Rows and optimizer states share slots and move between the memories together, except for narrow
    states. If both limits are given, rows and states together stay within the sum of the limits.

    Attributes:
        rows: bytes of index and rows; None for no limit.
        states: bytes of optimizer states; None if they count as rows.
    """

    rows: int | None = None
    states: int | None = None

    def hbm_bytes(self, memory: TableMemory, state_width: int) -> int | None:
        """Limit for a table in bytes, including the index; None for no limit."""
        if self.states is None or state_width == 0:
            return self.rows
        if self.rows is not None:
            return self.rows + self.states
        return memory.index_bytes + self.states // (4 * state_width) * memory.row_bytes


@dataclasses.dataclass(frozen=True)
class TableShape:
    """Several tables of equal shape.

    Attributes:
        tables: number of tables.
        dim: number of columns.
        state_width: number of float32 optimizer state values of a row.
        eviction: eviction policy.
        limits: limits of each table's GPU memory.
        device: device of the tables.
        initial_capacity: number of rows that each table has memory for at first.
        remember_evicted: number of evicted ids that each table remembers.
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
        """Memory of one table."""
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
        """Limit of one table's GPU memory in bytes; None for no limit."""
        return self.limits.hbm_bytes(self.memory(capacity), self.state_width)

    def max_rows(self, capacity: int, hbm_free: int, host_free: int) -> int:
        """Number of rows that each table can hold, at most ``capacity``; 0 if not even one fits.

        Args:
            capacity: requested number of rows.
            hbm_free: free bytes of GPU memory. All tables together may take 90 % of them.
            host_free: free bytes of host memory. All tables together may take 90 % of them.
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
        low, high = 0, capacity  # low is 0 or fits, high does not fit
        while high - low > max(1, low >> 10):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
