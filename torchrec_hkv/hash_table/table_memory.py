"""What a table takes in HBM and in host memory, known before it is made."""

from __future__ import annotations

import dataclasses

from torchrec_hkv import _C
from torchrec_hkv.hash_table.admission import Admission, admission_bytes
from torchrec_hkv.hash_table.eviction import EvictionPolicy, keeps_scores


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """Memory of a table of a given capacity, when it has grown to that.

    Attributes:
        num_slots: slots it gets: the capacity, rounded up by less than one slot a bucket.
        initial_slots: slots it begins with.
        bucket_slots: slots of one bucket, at most 64.
        index_bytes: digests, ids, steps, scores, the miniatures of an ``"adaptive"`` table, the
            counts of ids that are not admitted and the marks of evicted ones; always in HBM on a
            GPU. A large table that is alone in its group may take a little less there.
        row_bytes: one row with its optimizer state.
        state_bytes: of these, the state.
    """

    num_slots: int
    initial_slots: int
    bucket_slots: int
    index_bytes: int
    row_bytes: int
    state_bytes: int

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
    eviction: EvictionPolicy,
    element_bytes: int = 4,
    admission: Admission | None = None,
    initial_capacity: int | None = None,
    remember_evicted: int | None = None,
    restore_counts: bool = False,
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
        restore_counts: whether their counts come back, for 2 bytes more each.
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
        row_bytes=element_bytes * dim + 4 * state_width,
        state_bytes=4 * state_width,
    )


@dataclasses.dataclass(frozen=True)
class HbmShare:
    """What of a table's rows and states is in HBM.

    Attributes:
        slots: those of the table where all rows fit; otherwise the number of frames that rows from
            host memory come into, 0 where these would be fewer than a four-thousandth of the slots.
        sets: of the frames.
        all_states: whether the states of all slots are in HBM, though not all rows. They are where
            a state takes at most 16 bytes, and those of all slots at most half of the HBM that
            there is beside the index. Other states are where their rows are.
    """

    slots: int
    sets: int
    all_states: bool


def hbm_share_for(memory: TableMemory, hbm_bytes: int | None) -> HbmShare:
    """What is in HBM when the table may take ``hbm_bytes`` there (None: all)."""
    if hbm_bytes is None:
        return HbmShare(memory.num_slots, sets=0, all_states=False)
    slots, sets, all_states = _C.share_that_fits(
        memory.num_slots,
        memory.bucket_slots,
        memory.row_bytes - memory.state_bytes,
        memory.state_bytes,
        hbm_bytes - memory.index_bytes,
    )
    return HbmShare(slots, sets, all_states)


def hbm_slots_for(memory: TableMemory, hbm_bytes: int | None) -> int:
    """Rows that can be in HBM when the table may take ``hbm_bytes`` there (None: all).

    ``slots`` of :func:`hbm_share_for`.
    """
    return hbm_share_for(memory, hbm_bytes).slots


def gpu_table_bytes(memory: TableMemory, hbm_bytes: int | None) -> tuple[int, int]:
    """Bytes of HBM and of host memory of a table on a GPU that may take ``hbm_bytes`` of HBM.

    A table whose rows don't all fit in HBM has all of them in host memory, and some in frames.
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
