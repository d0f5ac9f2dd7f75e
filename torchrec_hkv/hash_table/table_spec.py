"""What a table is to be, and all that it holds."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.eviction import EvictionPolicy
from torchrec_hkv.hash_table.initializers import Initializer


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One table of a group.

    Attributes:
        name: mixed into the seed of its initial rows.
        capacity: rows it must hold, at least 1.
        dim: columns of its rows, 1 to 2048.
        eviction: which id leaves a full bucket: ``"lru"``, ``"lfu"``, an
            :class:`torchrec_hkv.hash_table.AgedLFU`, ``"adaptive"``, ``"epoch_lru"``,
            ``"epoch_lfu"`` or ``"customized"``; :class:`torchrec_hkv.hash_table.HashTable` says
            what their scores are.
        hbm_bytes: what it may take of a GPU's memory, index included. A table whose rows don't all
            fit there has all of them in host memory, and those of the highest score in HBM too.
            None: all in HBM. On a CPU the table is in host memory.
        seed: of the initial rows.
        initializer: distribution of the values of initial rows. None: zeros.
        column_offset: first column, where a table's columns are sharded.
        dtype: of rows: float32, float16 or bfloat16.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency` or
            ``Probability``. None: all.
        expire_after: an entry that was last touched more than so many steps ago leaves, at the
            latest ``min(64, expire_after)`` steps later, or as many after the table has last grown;
            at least 1. None: never.
        strict: a lookup that refuses an id for lack of a place raises; see
            :meth:`TableGroup.check_strict`.
        initial_capacity: rows it must hold at first, 1 to ``capacity``; it doubles before it gets
            too full, until it has all its capacity. Rounded up, to 16 buckets of 64 rows if need
            be, since the final number of buckets is a power of two times that at first. None: all
            from the start.
        remember_evicted: how many evicted ids it remembers at a time, in 2 bytes each, to count
            those that come back as ``returned``; 1 to 2^32. None: it does not count them.
        restore_counts: a new id that is remembered as evicted gets half of its count back, up to
            65,535, under a policy that counts lookups. It takes 4 bytes for each id of
            ``remember_evicted`` in place of 2, and on a GPU makes the group deterministic. False: a
            new id starts with one lookup.
        deterministic: on a GPU, too, what the table holds, and what calls return, follows from the
            calls alone, bit for bit; they then take a little longer
            (``docs/concepts/ordering.md``). It holds for all tables of a group, and for all groups
            while ``torch.use_deterministic_algorithms(True)`` does, which is asked in each call.
            A CPU is always deterministic.
    """

    name: str
    capacity: int
    dim: int
    eviction: EvictionPolicy = "lru"
    hbm_bytes: int | None = None
    seed: int = 0
    initializer: Initializer | None = None
    column_offset: int = 0
    dtype: torch.dtype = torch.float32
    admission: Admission | None = None
    expire_after: int | None = None
    strict: bool = False
    initial_capacity: int | None = None
    remember_evicted: int | None = None
    restore_counts: bool = False
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class TableState:
    """All that a table holds, but for the last by slot.

    Zeros in free slots, and in those that the table has yet to get: the first dimension
    ``num_slots`` is that of the full capacity.

    Attributes:
        occupied: bool.
        ids: int64.
        rows: ``[num_slots, dim]`` of the table's dtype.
        states: float32 ``[num_slots, state width]``.
        last_steps: int32, the step of each id's last training lookup.
        scores: int64, as calls take and give them; empty (``[0]``) under LRU.
        optimizer_step: int64 ``[1]``, updates of the table so far.
    """

    occupied: Tensor
    ids: Tensor
    rows: Tensor
    states: Tensor
    last_steps: Tensor
    scores: Tensor
    optimizer_step: Tensor
