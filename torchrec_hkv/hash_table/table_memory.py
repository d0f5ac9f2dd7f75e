"""What a table takes in HBM and in host memory, known before it is made."""

from __future__ import annotations

import dataclasses

from torchrec_hkv import _C
from torchrec_hkv.hash_table.admission import Admission, admission_bytes


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """Memory of a table of a given capacity, when it has grown to that.

    Attributes:
        num_slots: slots it gets: the capacity, rounded up by less than one slot a bucket.
        initial_slots: slots it begins with.
        bucket_slots: slots of one bucket, at most 64.
        index_bytes: digests, ids, steps, scores, the counts of ids that are not admitted and the
            marks of evicted ones; always in HBM on a GPU.
        row_bytes: one row with its optimizer state.
    """

    num_slots: int
    initial_slots: int
    bucket_slots: int
    index_bytes: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        """All the table takes."""
        return self.index_bytes + self.num_slots * self.row_bytes

    @property
    def least_hbm_bytes(self) -> int:
        """HBM without which a table can't be: its index, and one bucket with its rows."""
        bucket = self.bucket_slots * self.row_bytes + self.index_bytes * self.bucket_slots // (
            self.num_slots
        )
        return max(self.index_bytes, bucket)


def table_memory(
    capacity: int,
    dim: int,
    state_width: int,
    eviction: str,
    element_bytes: int = 4,
    admission: Admission | None = None,
    initial_capacity: int | None = None,
    remember_evicted: int | None = None,
) -> TableMemory:
    """Memory of a table.

    Args:
        capacity: rows it must hold, at least 1.
        dim: values a row.
        state_width: fp32 values of optimizer state a row.
        eviction: the policy; all but ``"lru"`` keep 8 bytes of score a slot.
        element_bytes: of a value of a row.
        admission: which new ids get a slot; what it counts takes memory.
        initial_capacity: rows it must hold before it grows; None: all from the start.
        remember_evicted: evicted ids that it remembers, 2 bytes each.
    """
    buckets, bucket_slots = _C.geometry(capacity, initial_capacity)
    return TableMemory(
        num_slots=buckets * bucket_slots,
        initial_slots=_C.initial_slots(capacity, initial_capacity),
        bucket_slots=bucket_slots,
        index_bytes=_C.index_bytes(capacity, eviction != "lru", initial_capacity)
        + admission_bytes(admission)
        + 2 * (remember_evicted or 0),
        row_bytes=element_bytes * dim + 4 * state_width,
    )


def hbm_slots_for(memory: TableMemory, hbm_bytes: int | None) -> int:
    """Rows that can be in HBM when the table may take ``hbm_bytes`` there (None: all).

    All slots, or else the number of frames that rows from host memory come into; 0 where these
    would be fewer than a four-thousandth of the slots.
    """
    if hbm_bytes is None:
        return memory.num_slots
    return _C.frames_that_fit(
        memory.num_slots, memory.bucket_slots, memory.row_bytes, hbm_bytes - memory.index_bytes
    )


def gpu_table_bytes(memory: TableMemory, hbm_bytes: int | None) -> tuple[int, int]:
    """Bytes of HBM and of host memory of a table on a GPU that may take ``hbm_bytes`` of HBM.

    A table whose rows don't all fit in HBM has all of them in host memory, and some in frames.
    """
    in_hbm = hbm_slots_for(memory, hbm_bytes)
    hbm = memory.index_bytes + in_hbm * memory.row_bytes
    if in_hbm == memory.num_slots:
        return hbm, 0
    sets = in_hbm // _C.FRAMES_OF_SET
    return hbm + sets * _C.SET_BYTES, memory.num_slots * memory.row_bytes
