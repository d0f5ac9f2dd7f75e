"""A single hash table that maps int64 ids to rows, scores and optimizer states."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.entries import Evicted
from torchrec_hkv.hash_table.eviction import AgedLFU, EvictionPolicy, check_c
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initializers import Initializer
from torchrec_hkv.hash_table.saved_table import SavedTable
from torchrec_hkv.hash_table.spec_checks import check_int64, check_integer, check_number
from torchrec_hkv.hash_table.table_selection import TableSelection
from torchrec_hkv.hash_table.table_spec import TableSpec


class HashTable(SavedTable, TableSelection):
    """A hash table from int64 ids to rows, with the operations of HierarchicalKV.

    Every int64 is a valid id. Calls accept ids of any integer dtype of 8 to 64 bits; a uint64 id
    means the int64 with the same bits. An id may occur several times in a call and has one
    entry. Calls never fail because an id is not in the table.

    Operations with an argument ``scores`` use it under policies that take scores from outside:
    counts to add under ``"lfu"``, ``"epoch_lfu"``, ``AgedLFU`` and ``"adaptive"`` (1 by default),
    and the score itself, any int64, under ``"customized"``. A negative count raises on a CPU. On a
    GPU, where a check would synchronize, it counts as 0. Counts add up to at most 2^63 - 1. Scores
    of the epoch policies are unsigned 64-bit numbers, returned as the int64 with the same bits.
    Calls that are counted as steps are insertions, ``find_or_insert``, ``assign`` and
    ``assign_scores``.

    Calls of several threads take effect one after the other. ``copy.deepcopy`` returns an
    independent table with the same contents. Tables can't be pickled: use :meth:`save` and
    :meth:`from_file`.

    | policy | score of an id | on a hit |
    | --- | --- | --- |
    | ``"lru"`` | number of the call that last touched it | set |
    | ``"lfu"`` | sum of counts | added |
    | ``AgedLFU(c)``, ``"adaptive"`` | sum of counts | added |
    | ``"epoch_lru"`` | epoch in the high 32 bits, number of the call in the low | set |
    | ``"epoch_lfu"`` | epoch in the high 32 bits, counts in the low | epoch set, counts added |
    | ``"customized"`` | as given | set |

    Each id has two buckets. If both are full, the entry with the lowest score is evicted; among
    equal scores, the one touched least recently. Entries touched by the same call are not evicted.
    Under :class:`torchrec_hkv.hash_table.AgedLFU` aged counts are compared; ``"adaptive"`` chooses
    its c while the table runs, by the hit rates of miniature tables. A new id is refused if its
    score is lower than all scores in its buckets, or if its buckets are full of ids of the same
    call. If an id has several scores in a call, it is refused only if all are too low. Counts are
    added; of other scores one is kept (on a CPU the last).

    Args:
        dim: number of columns, 1 to 2048.
        capacity: number of rows that the table must hold.
        initial_capacity: number of rows that the table has memory for at first. It doubles before
            it gets too full, and evicts nothing before it has its full capacity. None: the full
            capacity.
        device: a CPU or CUDA device.
        dtype: data type of the rows: float32, float16, bfloat16 or int8. Rows of int8 are integers
            with a float32 scale per row; calls take and return them as float32, rounded to
            the nearest.
        eviction: eviction policy.
        state_dim: number of float32 state values beside each row; zeros for a new id.
        hbm_bytes: limit of GPU memory in bytes, including the index. If not all rows fit, all of
            them are in host memory, and HBM caches those of the highest scores; insertions and
            ``find_or_insert`` bring rows into HBM. States are where their rows are, except for
            narrow ones (:class:`torchrec_hkv.hash_table.HbmShare`). None: all in HBM.
        name: name of the table, mixed into the seed of the initial rows.
        seed: seed of the initial rows.
        initializer: distribution of the initial values: a
            :class:`torchrec_hkv.hash_table.Uniform`, ``Normal``, ``TruncatedNormal`` or
            ``Constant``. None: zeros.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency` or
            ``Probability``. Ids that are not admitted are treated like refused ids, but counted
            separately. None: all are admitted.
        expire_after: number of calls after which an untouched entry is removed, at least 1. Removal
            may take up to ``min(64, expire_after)`` further calls, because each call first scans a
            part of the buckets. None: entries do not expire.
        strict: True: a lookup or insertion that finds no slot for an id raises. The other ids of
            the call have been inserted then. Ids that are not admitted, or whose score is too low,
            do not raise. :meth:`insert_and_evict` never raises, because it returns refused ids.
            A strict table synchronizes with the device in each such call.
        remember_evicted: number of evicted ids to remember, 1 to 2^32, 2 bytes each, so that
            :meth:`counters` includes how many returned (``returned``). None: not counted.
        restore_counts: True: a new id that is remembered as evicted gets half of its count back, up
            to 65,535, under a policy that counts lookups. Each remembered id then takes 4 bytes
            instead of 2, and on a GPU the table is deterministic. False: a new id starts with the
            given count.
        deterministic: True: on a GPU, contents and results depend on the calls only, bit for bit,
            and equal those of a CPU: the order of ``ids`` decides which ids get a slot, the last of
            several rows or scores for an id is kept, and rows are added in order. Calls are slower,
            most of all those that write rows. The table is also deterministic while
            ``torch.use_deterministic_algorithms(True)`` is set.

    Raises:
        ValueError: an argument has an invalid value.
        RuntimeError: a call of a strict table found no slot for an id. The message names the table,
            its load, and what to change.
    """

    def __init__(
        self,
        dim: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        eviction: EvictionPolicy = "lru",
        state_dim: int = 0,
        hbm_bytes: int | None = None,
        name: str = "table",
        seed: int = 0,
        initializer: Initializer | None = None,
        admission: Admission | None = None,
        expire_after: int | None = None,
        strict: bool = False,
        initial_capacity: int | None = None,
        remember_evicted: int | None = None,
        restore_counts: bool = False,
        deterministic: bool = False,
    ) -> None:
        check_integer(f"table {name!r}", "state_dim", state_dim)
        spec = TableSpec(
            name=name,
            capacity=capacity,
            dim=dim,
            eviction=eviction,
            hbm_bytes=hbm_bytes,
            seed=seed,
            initializer=initializer,
            dtype=dtype,
            admission=admission,
            expire_after=expire_after,
            strict=strict,
            initial_capacity=initial_capacity,
            remember_evicted=remember_evicted,
            restore_counts=restore_counts,
            deterministic=deterministic,
        )
        self._make(spec, state_dim, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> HashTable:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with self._group.unchanged():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> HashTable:
        raise TypeError(
            f"A {type(self).__name__} has no shallow copy, because it would share its memory: use "
            "copy.deepcopy."
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} can't be pickled: write it with save() and read it with "
            "from_file()."
        )

    def _make(self, spec: TableSpec, state_dim: int, device: torch.device | str) -> None:
        self._group = TableGroup([spec], [0], None, device=device, state_dim=state_dim)
        self.dim = spec.dim
        self.dtype = spec.dtype
        self.eviction = spec.eviction
        self.state_dim = state_dim
        self._epoch = 0

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self._group.device

    @property
    def group(self) -> TableGroup:
        """The group that consists of this table only."""
        return self._group

    def set_aging(self, c: float) -> None:
        """Sets the half-life of counts for later calls. Does not synchronize.

        Args:
            c: see :class:`torchrec_hkv.hash_table.AgedLFU`.

        Raises:
            ValueError: ``c`` is not a number of at least 0, or the table has another policy.
        """
        check_c("set_aging", c)
        self._group.set_aging(0, c)
        self.eviction = AgedLFU(c)

    @property
    def epoch(self) -> int:
        """The epoch of later calls, 0 to 2^32 - 1, for the epoch policies. May be set."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        check_number("epoch", epoch)
        if epoch == self._epoch:
            return
        with self._group.alone():
            self._group.set_epoch(epoch)
            self._epoch = epoch

    # -- lookups ----------------------------------------------------------------------------------

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Looks up rows. Changes nothing, not even scores.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.

        Returns:
            ``(rows, found)``: rows ``[n, dim]``, the initial row for ids that are not in the table,
            and bool ``[n]``, whether each id is in the table.
        """
        return self._group.find_rows(ids, None, 1)

    def find_slots(self, ids: Tensor) -> Tensor:
        """Looks up slots, int64 ``[n]``; -1 for ids that are not in the table. Changes nothing.

        A slot is valid until its id is evicted or erased, or the table grows.
        """
        return self._group.find_slots(ids, None, 1)

    def find_missing(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids that are not in the table, and their positions in ``ids``. Synchronizes with the
        device."""
        return self._group.find_missing(ids, None, 1)

    def contains(self, ids: Tensor) -> Tensor:
        """Whether ids are in the table, bool ``[n]``. Changes nothing."""
        return self._group.contains(ids, None, 1)

    def find_or_insert(self, ids: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Looks up rows, and inserts missing ids with their initial rows.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            scores: int64 ``[n]``, see the class; not allowed under ``"lru"`` and ``"epoch_lru"``.

        Returns:
            ``(rows, found)``: rows ``[n, dim]``, the initial row for ids that are refused or not
            admitted, and bool ``[n]``, whether each id was in the table before the call.
        """
        return self._group.find_or_insert_rows(ids, None, 1, scores)

    def find_or_insert_slots(
        self, ids: Tensor, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Like :meth:`find_or_insert`, but returns slots, not rows; -1 for ids without one."""
        return self._group.find_or_insert_slots(ids, None, 1, scores)

    # -- insertions -------------------------------------------------------------------------------

    def insert_or_assign(self, ids: Tensor, rows: Tensor, scores: Tensor | None = None) -> Tensor:
        """Sets rows and scores of ids, and inserts missing ids.

        If an id has several rows, one of them is stored (on a CPU the last).

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            rows: ``[n, dim]`` of the table's dtype; float32 for int8.
            scores: see :meth:`find_or_insert`.

        Returns:
            bool ``[n]``: False for ids that were refused or not admitted.
        """
        return self._group.insert_or_assign(ids, None, 1, rows, scores)

    def insert_and_evict(
        self, ids: Tensor, rows: Tensor, scores: Tensor | None = None, *, trim: bool = True
    ) -> Evicted:
        """Like :meth:`insert_or_assign`, but returns the entries that were evicted, refused or not
        admitted.

        Except for expired entries, nothing is lost: each entry is in the table or in the result.

        Args:
            ids: see :meth:`insert_or_assign`.
            rows: see :meth:`insert_or_assign`.
            scores: see :meth:`insert_or_assign`.
            trim: True: cut the result to its number of entries, which synchronizes with the device.
                False: the result has room for ``n`` entries, and ``count`` is on the device.
        """
        return self._group._insert_and_evict(ids, None, 1, rows, scores, trim)[0]

    def accum_or_assign(
        self, ids: Tensor, rows: Tensor, accumulate: Tensor, scores: Tensor | None = None
    ) -> None:
        """Adds rows to ids in the table, and assigns rows to missing ids.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            rows: ``[n, dim]`` of the table's dtype; float32 for int8.
            accumulate: bool ``[n]``: True if the caller expects the id in the table, False if it
                expects it to be missing. Ids for which this is wrong are skipped.
            scores: see :meth:`find_or_insert`.
        """
        self._group.accum_or_assign(ids, None, 1, rows, accumulate, scores)

    # -- changes of present entries ---------------------------------------------------------------

    def assign(self, ids: Tensor, rows: Tensor, scores: Tensor | None = None) -> Tensor:
        """Sets rows and scores of ids in the table; returns which were found, bool ``[n]``."""
        return self._group.assign(ids, None, 1, rows, scores)

    def assign_rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Sets rows, but not scores, of ids in the table; returns which were found, ``[n]``."""
        return self._group.assign_rows(ids, None, 1, rows)

    def assign_scores(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        """Updates scores, but not rows, of ids in the table as a hit does; returns which were
        found, bool ``[n]``."""
        return self._group.assign_scores(ids, None, 1, scores)

    def erase(self, ids: Tensor) -> None:
        """Removes ids; missing ids are skipped."""
        self._group.erase(ids, None, 1)

    def expire(self) -> None:
        """Removes all entries that were last touched more than ``expire_after`` calls ago.

        Later calls would remove them anyway. This does not count as a call.

        Raises:
            ValueError: the table has no ``expire_after``.
        """
        if self._group.tables[0].expire_after is None:
            raise ValueError(
                "expire_after is None, so no entry expires: create the table with expire_after, or "
                "call erase_if."
            )
        self._group.expire()

    def clear(self) -> None:
        """Removes all entries and resets the admission counters."""
        self._group.clear_table(0)

    # -- sizes ------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of entries. Synchronizes with the device."""
        return self._group.sizes()[0]

    @property
    def capacity(self) -> int:
        """Number of slots at full size: the requested capacity, rounded up.

        Without ``initial_capacity`` it is rounded up by less than one slot per bucket.
        """
        return self._group.num_slots

    @property
    def num_slots(self) -> int:
        """Number of slots now; grows up to the capacity."""
        return self._group.present_slots(0)

    def reserve(self, rows: int) -> None:
        """Grows the table now, so that ``rows`` rows in all fit without further growth.

        Slots found before become invalid. Synchronizes with the device.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity.
            RuntimeError: there is too little memory, or a CUDA graph is being captured; nothing has
                changed.
        """
        check_int64("rows", rows)
        self._group.reserve(0, rows)

    @property
    def load_factor(self) -> float:
        """Number of entries over capacity. Synchronizes with the device."""
        return self.size / self.capacity

    def counters(self) -> dict[str, int]:
        """Counts since the table was created, its size and its capacity. Synchronizes with the
        device.

        The keys are ``lookups``, ``hits``, ``inserted``, ``evicted``, ``refused``, ``unadmitted``,
        ``expired``, ``fetched``, ``written_back``, ``host_hits``, ``returned``, ``size`` and
        ``capacity``; see :meth:`torchrec_hkv.hash_table.TableGroup.counters`.
        """
        return self._group.counters()[0]
