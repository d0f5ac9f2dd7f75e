"""Memory of a table in HBM and on the host, known before the table is created."""

from __future__ import annotations

import dataclasses

from torchrec_hkv import _C
from torchrec_hkv.hash_table.admission import Admission, admission_bytes
from torchrec_hkv.hash_table.eviction import EvictionPolicy, keeps_scores
from torchrec_hkv.hash_table.stored_rows import stored_row_bytes


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """Memory of a table at its full capacity.

    Attributes:
        num_slots: number of slots: the capacity, rounded up by less than one slot per bucket.
        initial_slots: number of slots at first.
        bucket_slots: number of slots in a bucket, at most 64.
        index_bytes: bytes of digests, ids, steps, scores, miniature tables of an ``"adaptive"``
            table, admission counters and marks of evicted ids. On a GPU they are always in HBM. A
            large table that is alone in its group may take slightly less there.
        row_bytes: bytes of a row with its optimizer state.
        state_bytes: bytes of the optimizer state of a row.
    """

    num_slots: int
    initial_slots: int
    bucket_slots: int
    index_bytes: int
    row_bytes: int
    state_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole table."""
        return self.index_bytes + self.num_slots * self.row_bytes

    @property
    def least_hbm_bytes(self) -> int:
        """Least HBM with which the table can be created: its index, and one bucket of rows."""
        bucket = self.bucket_slots * self.row_bytes + self.index_bytes * self.bucket_slots // (
            self.num_slots
        )
        return max(self.index_bytes, bucket)


def table_memory(
    capacity: int,
    dim: int,
    state_width: int,
    eviction: EvictionPolicy,
    element_bytes: int = 4,
    admission: Admission | None = None,
    initial_capacity: int | None = None,
    remember_evicted: int | None = None,
    restore_counts: bool = False,
) -> TableMemory:
    """Computes the memory of a table at its full capacity.

    Args:
        capacity: number of rows that the table must hold, at least 1.
        dim: number of columns.
        state_width: number of float32 optimizer state values of a row.
        eviction: eviction policy. All but ``"lru"`` store scores, 8 bytes a slot.
        element_bytes: bytes of one value of a row; 1 for rows of int8, which have a scale besides.
        admission: admission rule; its counters take memory.
        initial_capacity: number of rows before the table grows; None for the full capacity.
        remember_evicted: number of evicted ids that the table remembers, 2 bytes each.
        restore_counts: whether counts of remembered ids are restored, for 2 more bytes each.
    """
    buckets, bucket_slots = _C.geometry(capacity, initial_capacity)
    return TableMemory(
        num_slots=buckets * bucket_slots,
        initial_slots=_C.initial_slots(capacity, initial_capacity),
        bucket_slots=bucket_slots,
        index_bytes=_C.index_bytes(capacity, keeps_scores(eviction), initial_capacity)
        + admission_bytes(admission)
        + (_C.miniature_bytes(capacity, initial_capacity) if eviction == "adaptive" else 0)
        + (4 if restore_counts else 2) * (remember_evicted or 0),
        row_bytes=stored_row_bytes(dim, element_bytes) + 4 * state_width,
        state_bytes=4 * state_width,
    )


@dataclasses.dataclass(frozen=True)
class HbmShare:
    """The part of a table's rows and states that is in HBM.

    Attributes:
        slots: if all rows fit, the table's number of slots. Otherwise the number of frames in HBM
            that cache rows of host memory; 0 if less than 1 / 4000 of the slots would have one.
        sets: number of sets of the frames.
        all_states: whether HBM holds the states of all slots, but not all rows. This is the case if
            a state takes at most 16 bytes, and all states at most half of the HBM besides the
            index. Otherwise states are where their rows are.
    """

    slots: int
    sets: int
    all_states: bool


def hbm_share_for(memory: TableMemory, hbm_bytes: int | None) -> HbmShare:
    """The part of a table that is in HBM under the limit ``hbm_bytes`` (None: all of it)."""
    if hbm_bytes is None:
        return HbmShare(memory.num_slots, sets=0, all_states=False)
    slots, sets, all_states = _C.hbm_capacity(
        memory.num_slots,
        memory.bucket_slots,
        memory.row_bytes - memory.state_bytes,
        memory.state_bytes,
        hbm_bytes - memory.index_bytes,
    )
    return HbmShare(slots, sets, all_states)


def hbm_slots_for(memory: TableMemory, hbm_bytes: int | None) -> int:
    """Number of rows that can be in HBM under the limit ``hbm_bytes`` (None: all of them).

    Equals ``slots`` of :func:`hbm_share_for`.
    """
    return hbm_share_for(memory, hbm_bytes).slots


def gpu_table_bytes(memory: TableMemory, hbm_bytes: int | None) -> tuple[int, int]:
    """Bytes of HBM and of host memory of a table on a GPU under the limit ``hbm_bytes`` of HBM.

    If not all rows fit in HBM, all of them are in host memory and some are cached in frames.
    """
    share = hbm_share_for(memory, hbm_bytes)
    if share.slots == memory.num_slots:
        return memory.bytes, 0
    hbm = memory.index_bytes + share.slots * memory.row_bytes + share.sets * _C.SET_BYTES
    host = memory.num_slots * memory.row_bytes
    if share.all_states:
        hbm += (memory.num_slots - share.slots) * memory.state_bytes
        host -= memory.num_slots * memory.state_bytes
    return hbm, host
