"""One hash table by itself: any int64 id to a row, a score and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from torchrec_hkv.hash_table.admission import Admission
from torchrec_hkv.hash_table.entries import Entries, Evicted
from torchrec_hkv.hash_table.eviction import AgedLFU, EvictionPolicy, check_c
from torchrec_hkv.hash_table.groups.selection import Conditions, check_some_condition
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initializers import Initializer
from torchrec_hkv.hash_table.saved_table import SavedTable
from torchrec_hkv.hash_table.spec_checks import check_integer, check_number
from torchrec_hkv.hash_table.table_spec import TableSpec


class HashTable(SavedTable):
    """A table of rows by int64 id, with HierarchicalKV's operations.

    Every int64 is a legal id. Calls take ids of any integer dtype of 8 to 64 bits; a uint64 id
    stands for the int64 of the same bits. Ids may repeat within a call: they end as one entry. A
    call on an id that is not there never fails.

    Operations that name a score take it where the policy takes scores from outside: counts to add
    under ``"lfu"``, ``"epoch_lfu"``, ``AgedLFU`` and ``"adaptive"`` (1 where none is given), the
    score itself, any int64, under ``"customized"``. A count below 0 is refused; on a GPU, where
    looking would wait for the device, it counts as 0. Counts add up to at most 2^63 - 1. Scores of
    the epoch policies are unsigned 64-bit numbers, given back as the int64 of the same bits.
    Counted calls are insertions, ``find_or_insert`` among them, and ``assign`` and
    ``assign_scores``.

    Calls of several threads come out as if made one after the other. ``copy.deepcopy`` gives a
    table of its own with all that this one holds. A table can't be pickled: use :meth:`save` and
    :meth:`from_file`.

    | policy | score of an id | on a hit |
    | --- | --- | --- |
    | ``"lru"`` | number of the call that last touched it | set |
    | ``"lfu"`` | counts, added up | added |
    | ``AgedLFU(c)``, ``"adaptive"`` | counts, added up | added |
    | ``"epoch_lru"`` | epoch in the high 32 bits, number of the call in the low | set |
    | ``"epoch_lfu"`` | epoch in the high 32 bits, counts in the low | epoch set, counts added |
    | ``"customized"`` | as given | set |

    In two full buckets the lowest score leaves, among equals the one touched longest ago; what the
    same call has touched stays. Under :class:`torchrec_hkv.hash_table.AgedLFU` counts are compared
    by what they are worth at their age; ``"adaptive"`` chooses its c while the table runs, by the
    hit rates of miniatures of the table. An id whose own score is lower than all of those is
    refused, and so is one whose buckets are full of ids of the same call. Of several scores given
    for one id, all must be too low for that; counts add up, and of other scores one stays (on a CPU
    the last).

    Args:
        dim: columns of a row, 1 to 2048.
        capacity: rows the table must hold.
        initial_capacity: rows it must hold at first. It doubles before it gets too full, so that
            nothing is evicted before it has all its capacity; memory it takes as it grows. None:
            all from the start.
        device: a CPU or CUDA device.
        dtype: of rows: float32, float16 or bfloat16.
        eviction: the policy.
        state_dim: float32 values of state beside each row, zeros for a new id.
        hbm_bytes: what the table may take of a GPU's memory, index included. A table whose rows
            don't all fit there has all of them in host memory, and those of the highest score in
            HBM too: insertions and ``find_or_insert`` bring them there. States go with their rows,
            but for narrow ones (:class:`torchrec_hkv.hash_table.HbmShare`). None: all in HBM.
        name: mixed into the seed of initial rows.
        seed: of the initial rows.
        initializer: distribution of the values of initial rows: a
            :class:`torchrec_hkv.hash_table.Uniform`, ``Normal``, ``TruncatedNormal`` or
            ``Constant``. None: zeros.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency` or
            ``Probability``. One that is not admitted fares as a refused one does, but is counted
            apart. None: all are admitted.
        expire_after: an entry that was last touched more than so many calls ago is forgotten, at
            the latest ``min(64, expire_after)`` calls later: each call looks through a part of the
            buckets before it does anything else. At least 1. None: never.
        strict: a lookup or insertion that refuses an id for lack of a place raises. The other ids
            of the call have been placed then, with their rows. Ids that are not admitted, or whose
            score is too low, don't raise, and :meth:`insert_and_evict`, which gives refused ids
            back, never does. A strict table waits for the device in each such call.
        remember_evicted: how many evicted ids to remember at a time, in 2 bytes each, so that
            :meth:`counters` tells how many came back (``returned``); 1 to 2^32. None: not counted.
        restore_counts: a new id that is remembered as evicted gets half of its count back, up to
            65,535, under a policy that counts lookups. It takes 4 bytes for each id of
            ``remember_evicted`` in place of 2, and on a GPU makes the table deterministic. False: a
            new id starts with the count that it is given.
        deterministic: on a GPU, too, what the table holds, and what calls return, follows from the
            calls alone, bit for bit, and is what a CPU would give: the order of ``ids`` decides who
            gets a place, the last of several rows or scores for one id stays, and rows are added up
            in order. Calls then take longer, where rows are written above all. So it is while
            ``torch.use_deterministic_algorithms(True)`` holds.

    Raises:
        ValueError: an argument is impossible.
        RuntimeError: in calls of a strict table; it names the table, its load, and what to change.
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
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        with self._group.unchanged():
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> HashTable:
        raise TypeError(
            f"A {type(self).__name__} has no shallow copy, which would share its memory: use "
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
        """Where the table is."""
        return self._group.device

    @property
    def group(self) -> TableGroup:
        """The group that has this table alone."""
        return self._group

    def set_aging(self, c: float) -> None:
        """Sets the half-life of counts for the calls to come; does not wait for the device.

        Args:
            c: as of :class:`torchrec_hkv.hash_table.AgedLFU`.

        Raises:
            ValueError: ``c`` is no number of at least 0, or the table has another policy.
        """
        check_c("set_aging", c)
        self._group.set_aging(0, c)
        self.eviction = AgedLFU(c)

    @property
    def epoch(self) -> int:
        """The epoch of the calls to come, 0 to 2^32 - 1, for the epoch policies. To be set."""
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
        """Rows of ids; changes nothing, scores neither.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.

        Returns:
            ``(rows, found)``: ``[n, dim]``, where an id that is not there has its initial row, and
            bool ``[n]``.
        """
        return self._group.find_rows(ids, None, 1)

    def find_slots(self, ids: Tensor) -> Tensor:
        """Slots of ids, int64 ``[n]``, -1 where an id is not there; changes nothing.

        A slot is valid until its id is evicted or erased, or the table grows.
        """
        return self._group.find_slots(ids, None, 1)

    def find_missing(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids that are not in the table and their positions in ``ids`` (waits for the device)."""
        return self._group.find_missing(ids, None, 1)

    def contains(self, ids: Tensor) -> Tensor:
        """Whether ids are in the table, bool ``[n]``; changes nothing."""
        return self._group.contains(ids, None, 1)

    def find_or_insert(self, ids: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of ids; those that are not there are inserted with their initial rows.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            scores: int64 ``[n]``, see the class; not under policies that make their own.

        Returns:
            ``(rows, found)``: ``[n, dim]`` (of an id that is refused or not admitted its initial
            row), and bool ``[n]``: whether an id was there before the call.
        """
        return self._group.find_or_insert_rows(ids, None, 1, scores)

    def find_or_insert_slots(
        self, ids: Tensor, scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`find_or_insert`, with slots instead of rows; -1 for ids without one."""
        return self._group.find_or_insert_slots(ids, None, 1, scores)

    # -- insertions -------------------------------------------------------------------------------

    def insert_or_assign(self, ids: Tensor, rows: Tensor, scores: Tensor | None = None) -> Tensor:
        """Sets rows and scores of ids, inserting those that are not there.

        Of several rows for one id, one is taken whole (on a CPU the last).

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            rows: ``[n, dim]`` of the table's dtype.
            scores: as in :meth:`find_or_insert`.

        Returns:
            bool ``[n]``: False for ids that were refused or not admitted.
        """
        return self._group.insert_or_assign(ids, None, 1, rows, scores)

    def insert_and_evict(
        self, ids: Tensor, rows: Tensor, scores: Tensor | None = None, *, trim: bool = True
    ) -> Evicted:
        """As :meth:`insert_or_assign`; gives back what it threw out, refused or did not admit.

        The table and what it gave back together are what was in the table and what was given, but
        for entries that expire.

        Args:
            ids: as in :meth:`insert_or_assign`.
            rows: as in :meth:`insert_or_assign`.
            scores: as in :meth:`insert_or_assign`.
            trim: cut what is given back to its number of entries, which waits for the device.
                Otherwise there is room for as many entries as ids, and only the device knows how
                many there are.
        """
        return self._group._insert_and_evict(ids, None, 1, rows, scores, trim)[0]

    def accum_or_assign(
        self, ids: Tensor, rows: Tensor, accumulate: Tensor, scores: Tensor | None = None
    ) -> None:
        """Adds rows to ids that are there, assigns them to ids that are not.

        Args:
            ids: integers ``[n]`` of 8 to 64 bits.
            rows: ``[n, dim]`` of the table's dtype.
            accumulate: bool ``[n]``, what the caller believes of each id: True that it is there,
                False that it is not. Where the belief is wrong, nothing is done with the id.
            scores: as in :meth:`find_or_insert`.
        """
        self._group.accum_or_assign(ids, None, 1, rows, accumulate, scores)

    # -- changes of what is there -----------------------------------------------------------------

    def assign(self, ids: Tensor, rows: Tensor, scores: Tensor | None = None) -> Tensor:
        """Sets rows and scores of ids that are there; returns which, bool ``[n]``."""
        return self._group.assign(ids, None, 1, rows, scores)

    def assign_rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Sets rows, not scores, of ids that are there; returns which, bool ``[n]``."""
        return self._group.assign_rows(ids, None, 1, rows)

    def assign_scores(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        """Sets scores, not rows, of ids that are there, as a hit does; returns which."""
        return self._group.assign_scores(ids, None, 1, scores)

    def erase(self, ids: Tensor) -> None:
        """Forgets ids; those that are not there are passed over."""
        self._group.erase(ids, None, 1)

    def erase_if(
        self,
        *,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
        where: Callable[[Entries], Tensor] | None = None,
    ) -> int:
        """Forgets all entries that meet every given condition; returns how many.

        Args:
            score_below: score less than this: from -2^63 to 2^63 - 1 under ``"customized"``, from 0
                to 2^64 - 1 under other policies.
            score_at_least: score not less than this.
            older_than: last touched more than this many calls ago.
            where: a predicate on rows or whatever else a table keeps: it is given entries, a
                bounded number at a time, and says which of them are meant, bool ``[n]``.

        Raises:
            TypeError: ``where`` gives something else.
            ValueError: so, or a bound is out of range, or an age is negative, or no condition is
                given: :meth:`clear` erases all.
        """
        conditions = Conditions(
            score_below=score_below, score_at_least=score_at_least, older_than=older_than
        )
        check_some_condition("clear()", where, conditions)
        return self._group.erase_if(where=where, **conditions)

    def expire(self) -> None:
        """Forgets all entries that were last touched more than ``expire_after`` calls ago.

        They would be forgotten in the next calls anyway. It does not count as a call.

        Raises:
            ValueError: the table has no ``expire_after``.
        """
        if self._group.tables[0].expire_after is None:
            raise ValueError(
                "expire_after is None, so that nothing expires: give it to a new table, or call "
                "erase_if."
            )
        self._group.expire()

    def clear(self) -> None:
        """Forgets all, the counts of ids that are not admitted too."""
        self._group.clear_table(0)

    # -- exports ----------------------------------------------------------------------------------

    def export(self, batch_size: int = 1 << 20) -> Iterator[Entries]:
        """All entries, in batches of at most ``batch_size`` (bounded memory).

        The entries are those of the first batch's moment, each with the row and the score that it
        has when its batch is given. Entries that have been given may be erased.

        Raises:
            RuntimeError: an entry that was still to be given has left, or the table has grown.
        """
        yield from self.export_if(batch_size=batch_size)

    def export_if(
        self,
        *,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
        where: Callable[[Entries], Tensor] | None = None,
        batch_size: int = 1 << 20,
    ) -> Iterator[Entries]:
        """Entries that meet every given condition; see :meth:`erase_if`."""
        for part in self._group.export_if(
            score_below=score_below,
            score_at_least=score_at_least,
            older_than=older_than,
            where=where,
            batch_size=batch_size,
        ):
            yield Entries(part.ids, part.rows, part.scores, part.states)

    # -- sizes ------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Entries (waits for the device)."""
        return self._group.sizes()[0]

    @property
    def capacity(self) -> int:
        """Slots when it has grown: the capacity asked for, rounded up.

        Rounded by less than one slot a bucket where the table has all from the start.
        """
        return self._group.num_slots

    @property
    def num_slots(self) -> int:
        """Slots at present; the table grows up to its capacity."""
        return self._group.present_slots(0)

    def reserve(self, rows: int) -> None:
        """Grows the table now, so that it takes ``rows`` rows in all without growing.

        Slots that were found before are not valid any more. Waits for the device.

        Raises:
            ValueError: ``rows`` is negative, or more than the capacity.
            RuntimeError: there is too little memory, or a CUDA graph is being captured; nothing has
                changed.
        """
        check_number("rows", rows)
        self._group.reserve(0, rows)

    @property
    def load_factor(self) -> float:
        """Entries over capacity (waits for the device)."""
        return self.size / self.capacity

    def counters(self) -> dict[str, int]:
        """Counts since the table was made, its size and its capacity (waits for the device).

        ``lookups``, ``hits``, ``inserted``, ``evicted``, ``refused``, ``unadmitted``, ``expired``,
        ``size`` and ``capacity``; see :meth:`torchrec_hkv.hash_table.TableGroup.counters`.
        """
        return self._group.counters()[0]
