"""The specification of a table, and its exported state."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.eviction import EvictionPolicy
from torchrec_hkv.hash_table.initializers import Initializer


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """Specification of one table of a group.

    Attributes:
        name: name of the table, mixed into the seed of its initial rows.
        capacity: number of rows that the table must hold, at least 1.
        dim: number of columns, 1 to 2048.
        eviction: policy that chooses which id leaves a full bucket: ``"lru"``, ``"lfu"``, an
            :class:`torchrec_hkv.hash_table.AgedLFU`, ``"adaptive"``, ``"epoch_lru"``,
            ``"epoch_lfu"`` or ``"customized"``. Their scores are in
            :class:`torchrec_hkv.hash_table.HashTable`.
        hbm_bytes: limit of GPU memory in bytes, including the index. If not all rows fit, all of
            them are in host memory, and HBM caches those of the highest scores. None: all in HBM.
            On a CPU the table is in host memory.
        seed: seed of the initial rows.
        initializer: distribution of the initial values. None: zeros.
        column_offset: first column of the table, if columns are sharded.
        dtype: data type of the rows: float32, float16, bfloat16 or int8. Rows of int8 are integers
            with a float32 scale for each row; calls take and return them as float32. Updates round
            them stochastically.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency` or
            ``Probability``. None: all.
        expire_after: number of steps without a lookup after which an entry is removed, at least 1.
            Removal may take up to ``min(64, expire_after)`` further steps, also after the table has
            grown. None: entries do not expire.
        strict: whether a lookup that finds no slot for an id raises; see
            :meth:`TableGroup.check_strict`.
        initial_capacity: number of rows that the table has memory for at first, 1 to ``capacity``.
            It doubles before it gets too full, up to its capacity. The final number of buckets is
            the initial one times a power of two, so ``initial_capacity`` may be rounded up to 16
            buckets of 64 rows. None: the full capacity.
        remember_evicted: number of evicted ids to remember, 1 to 2^32, 2 bytes each, to count those
            that return as ``returned``. None: they are not counted.
        restore_counts: True: a new id that is remembered as evicted gets half of its count back, up
            to 65,535, under a policy that counts lookups. Each remembered id then takes 4 bytes
            instead of 2, and on a GPU the group is deterministic. False: a new id starts with the
            count 1.
        deterministic: True: on a GPU, contents and results depend on the calls only, bit for bit;
            calls are slightly slower (``docs/concepts/ordering.md``). Applies to all tables of a
            group. Groups are also deterministic while ``torch.use_deterministic_algorithms(True)``
            is set; each call checks this. A CPU is always deterministic.
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
    """The contents of a table, by slot except for the last tensor.

    The first dimension ``num_slots`` is that of the full capacity. Free slots, and slots that the
    table has not grown to, hold zeros.

    Attributes:
        occupied: bool ``[num_slots]``.
        ids: int64 ``[num_slots]``.
        rows: ``[num_slots, dim]`` of the table's dtype; of int8 tables the stored bytes
            (:mod:`torchrec_hkv.hash_table.stored_rows`).
        states: float32 ``[num_slots, state width]``.
        last_steps: int32 ``[num_slots]``, the step of each id's last training lookup.
        scores: int64 ``[num_slots]``, as calls take and return them; ``[0]`` under LRU.
        optimizer_step: int64 ``[1]``, number of updates of the table so far.
    """

    occupied: Tensor
    ids: Tensor
    rows: Tensor
    states: Tensor
    last_steps: Tensor
    scores: Tensor
    optimizer_step: Tensor
