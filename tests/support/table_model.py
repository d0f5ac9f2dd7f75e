"""A Python model of HashTable, which shares no code with it.

The model predicts rows and scores. It predicts evictions from a full table if every id may take
every slot and ids are placed in the order of the call (on a CPU with at most two buckets).
Otherwise it reads from the real table which ids have left, and checks that these ids were allowed
to leave.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from tests.support.admission_model import EveryId
from tests.support.aged_lfu_model import AgedLFUModel
from tests.support.geometry import geometry
from tests.support.table_observation import ObservedEntry, Row
from torchrec_hkv.hash_table import AgedLFU, EvictionPolicy

AGED = (AgedLFU(0.0), AgedLFU(0.7), AgedLFU(math.inf))
POLICIES = ("lru", "lfu", "epoch_lru", "epoch_lfu", "customized", *AGED)
TAKES_SCORES = ("lfu", "epoch_lfu", "customized", *AGED)
UINT32_MAX, INT64_MAX = 2**32 - 1, 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """The model's entry of an id.

    Attributes:
        row: values of the row.
        score: score of the policy; signed if customized.
        touched: number of the last call that touched the id.
    """

    row: Row
    score: int
    touched: int


@dataclasses.dataclass(frozen=True)
class Insertion:
    """The result of a call that inserts.

    Attributes:
        found: for each position, whether the id was in the table before.
        placed: for each position, whether its id has a slot.
        evicted: entries that left.
        first_scores: for each position, the score with which the id would be inserted.
    """

    found: list[bool]
    placed: list[bool]
    evicted: dict[int, Entry]
    first_scores: list[int]


def one_of_each(ids: Sequence[int], values: Sequence[Row]) -> dict[int, list[Row]]:
    """Returns the values given for each id, in order."""
    given: dict[int, list[Row]] = {}
    for id_, value in zip(ids, values, strict=True):
        given.setdefault(id_, []).append(value)
    return given


class TableModel:
    """Entries by id.

    Args:
        policy: the eviction policy.
        capacity: requested capacity of the real table.
        initial_row: returns the initial row of an id.
        add: returns the sum of two rows with the table's rounding.
        in_order: whether the real table places ids in the order of a call.
        admission: admission of new ids.
        expire_after: number of calls, or None for never.
        initial: initial capacity of the real table.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity: int,
        initial_row: Callable[[int], Row],
        add: Callable[[Row, Row], Row],
        in_order: bool,
        admission: EveryId | None = None,
        expire_after: int | None = None,
        initial: int | None = None,
    ) -> None:
        self.policy = policy
        self.initial_row = initial_row
        self.add = add
        self.in_order = in_order
        _, buckets, self.bucket_slots = geometry(capacity, capacity if initial is None else initial)
        self.num_slots = buckets * self.bucket_slots
        # With two buckets, an id's two candidates are all buckets.
        self.exact = in_order and buckets <= 2
        self.calls = 0
        self.epoch = 0
        self.admission = admission or EveryId()
        self.expire_after = expire_after
        self.inserted = self.evicted = self.refused = self.unadmitted = self.expired = 0
        self.lookups = 0
        self.aged = AgedLFUModel(policy.c) if isinstance(policy, AgedLFU) else None
        self.entries: dict[int, Entry] = {}
        self.slots: dict[int, int] = {}
        self.buckets: dict[int, set[int]] = {}

    # -- scores -----------------------------------------------------------------------------------

    def first_score(self, given: int) -> int:
        """Returns the score of an inserted id."""
        if self.aged is not None:
            return given
        return {
            "lru": self.calls,
            "lfu": given,
            "epoch_lru": self.epoch << 32 | self.calls,
            "epoch_lfu": self.epoch << 32 | min(given, UINT32_MAX),
            "customized": given,
        }[self.policy]

    def next_score(self, old: int, given: int) -> int:
        """Returns the score of an id that is found again."""
        if self.policy == "lfu" or self.aged is not None:
            return min(old + given, INT64_MAX)
        if self.policy == "epoch_lfu":
            return self.epoch << 32 | min((old & UINT32_MAX) + given, UINT32_MAX)
        return self.first_score(given)

    def _rank(self, score: int, touched: int) -> int:
        return score if self.aged is None else self.aged.rank(score, touched)

    def _order(self, entry: Entry) -> tuple[int, int]:
        """Returns the sort key of an entry. The lowest leaves first."""
        return self._rank(entry.score, entry.touched), entry.touched

    def _first_rank(self, given: int) -> int:
        """Returns the rank of an inserted id."""
        return self._rank(self.first_score(given), self.calls)

    def _meet(self, id_: int, given: int) -> None:
        entry = self.entries[id_]
        score = self.next_score(entry.score, given)
        self.entries[id_] = dataclasses.replace(entry, score=score, touched=self.calls)

    # -- time -------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Begins a call; removes its share of the expired entries."""
        self.calls += 1
        self.admission.begin_call(self.calls)
        if self.expire_after is not None:
            period = min(64, self.expire_after)
            self._expire(
                id_
                for id_ in self.entries
                if self.slots[id_] // self.bucket_slots % period == self.calls % period
            )

    def expire(self) -> None:
        """Removes all expired entries."""
        self._expire(self.entries)

    def _expire(self, ids: Iterable[int]) -> None:
        assert self.expire_after is not None
        now, age = self.calls, self.expire_after
        expired = [id_ for id_ in ids if now - self.entries[id_].touched > age]
        for id_ in expired:
            del self.entries[id_], self.slots[id_]
        self.expired += len(expired)

    # -- calls ------------------------------------------------------------------------------------

    def insert(
        self,
        ids: Sequence[int],
        given: Sequence[int] | None,
        after: dict[int, ObservedEntry],
        slots: int | None = None,
        named: int | None = None,
    ) -> Insertion:
        """Updates scores and entries for a call that inserts; new ids have their initial rows.

        The call must have begun. ``slots`` is the table's current number of slots, by default all;
        ``named`` is the number of ids of the call, by default that of ``ids``.
        """
        if self.aged is not None and (len(ids) if named is None else named):
            self.aged.begin_call(self.calls, self.lookups, slots or self.num_slots)
        self.lookups += len(ids)
        given = [1] * len(ids) if given is None else given
        before = dict(self.entries)
        found = [id_ in before for id_ in ids]
        evicted = {id_: entry for id_, entry in before.items() if id_ not in after}
        assert not evicted.keys() & set(ids), "an id left during a call that names it"
        for id_, score, hit in zip(ids, given, found, strict=True):
            if hit:
                self._meet(id_, score)
        placed = list(found)
        missing = [at for at, hit in enumerate(found) if not hit]
        admitted = self.admission.admitted([ids[at] for at in missing])
        self.unadmitted += sum(ids[at] not in admitted for at in missing)
        missing = [at for at in missing if ids[at] in admitted]
        if self.exact:
            self._place_in_order(ids, given, missing, placed, after)
            assert evicted.keys() == before.keys() - self.entries.keys(), "others should have left"
            self.refused += sum(not placed[at] for at in missing)
        else:
            self._take_over(ids, given, missing, placed, evicted, after)
        self.inserted += len(self.entries.keys() - before.keys())
        self.evicted += len(evicted)
        self._take_one_score(ids, given, after)
        return Insertion(found, placed, evicted, [self.first_score(score) for score in given])

    def _place_in_order(
        self,
        ids: Sequence[int],
        given: Sequence[int],
        missing: Iterable[int],
        placed: list[bool],
        after: dict[int, ObservedEntry],
    ) -> None:
        # Candidates don't change during the call, because touched entries stay. Among equal
        # candidates, the real table may choose any.
        candidates = [
            (self._order(entry), id_ in after, id_)
            for id_, entry in self.entries.items()
            if entry.touched != self.calls
        ]
        candidates.sort(reverse=True)
        highest: dict[int, int] = {}
        for at in missing:
            highest[ids[at]] = max(given[at], highest.get(ids[at], given[at]))
        for at in missing:
            id_ = ids[at]
            if id_ in self.entries:  # placed earlier in this call
                self._meet(id_, given[at])
                placed[at] = True
                continue
            new_score = self.first_score(given[at])
            if len(self.entries) == self.num_slots:
                if not candidates or self._first_rank(highest[id_]) < candidates[-1][0][0]:
                    continue
                del self.entries[candidates.pop()[2]]
            self.entries[id_] = Entry(self.initial_row(id_), new_score, self.calls)
            placed[at] = True

    def _take_over(
        self,
        ids: Sequence[int],
        given: Sequence[int],
        missing: Iterable[int],
        placed: list[bool],
        evicted: dict[int, Entry],
        after: dict[int, ObservedEntry],
    ) -> None:
        """Reads new and evicted ids from the real table, and checks that they are allowed."""
        scores: dict[int, list[int]] = {}
        for at in missing:
            scores.setdefault(ids[at], []).append(given[at])
        for id_ in evicted:
            del self.entries[id_]
        # By bucket: number of entries, and the lowest entry that could have left.
        filled: dict[int, int] = {}
        lowest: dict[int, tuple[int, int]] = {}
        holder: dict[int, int] = {}
        for id_, seen in after.items():
            bucket = seen.slot // self.bucket_slots
            filled[bucket] = filled.get(bucket, 0) + 1
            holder[seen.slot] = id_
            entry = self.entries.get(id_)
            if entry is not None and entry.touched != self.calls:
                order = self._order(entry)
                lowest[bucket] = min(order, lowest.get(bucket, order))
        for id_, entry in evicted.items():
            if id_ not in self.slots:  # the table has grown in this call
                continue
            slot = self.slots[id_]
            bucket = slot // self.bucket_slots
            assert filled[bucket] == self.bucket_slots, "an id left a bucket that has room"
            order = self._order(entry)
            assert order <= lowest.get(bucket, order), "a lower score stayed"
            assert holder[slot] in scores, "an id left, and its slot is not a new id's"
            holder_rank = max(self._first_rank(score) for score in scores[holder[slot]])
            assert holder_rank >= order[0], "an id left for one of lower score"
        for id_, its_scores in scores.items():
            if id_ in after:
                self.entries[id_] = self._new_entry(id_, its_scores)
                continue
            holder_rank = max(self._first_rank(score) for score in its_scores)
            assert any(
                number == self.bucket_slots
                and (bucket not in lowest or holder_rank < lowest[bucket][0])
                for bucket, number in filled.items()
            ), f"id {id_} was refused, but no bucket is full of better ones"
        for at in missing:
            placed[at] = ids[at] in after

    def _new_entry(self, id_: int, given: list[int]) -> Entry:
        score = self.first_score(given[0])
        for more in given[1:]:
            score = self.next_score(score, more)
        return Entry(self.initial_row(id_), score, self.calls)

    def _take_one_score(
        self, ids: Sequence[int], given: Sequence[int], after: dict[int, ObservedEntry]
    ) -> None:
        """Accepts any of several customized scores for one id."""
        if self.policy != "customized":
            return
        allowed: dict[int, set[int]] = {}
        for id_, score in zip(ids, given, strict=True):
            allowed.setdefault(id_, set()).add(score)
        for id_, scores in allowed.items():
            if len(scores) > 1 and id_ in self.entries and id_ in after:
                assert after[id_].score in scores, f"id {id_} has a score that nobody gave"
                self.entries[id_] = dataclasses.replace(self.entries[id_], score=after[id_].score)

    def touch(
        self, ids: Sequence[int], given: Sequence[int] | None, after: dict[int, ObservedEntry]
    ) -> None:
        """Updates scores for a call that only changes existing entries; it must have begun."""
        given = [1] * len(ids) if given is None else given
        for id_, score in zip(ids, given, strict=True):
            if id_ in self.entries:
                self._meet(id_, score)
        self._take_one_score(ids, given, after)

    def set_rows(
        self, ids: Sequence[int], rows: Sequence[Row], after: dict[int, ObservedEntry], last: bool
    ) -> None:
        """Sets rows of existing ids: the last given row, or any of them."""
        for id_, given in one_of_each(ids, rows).items():
            if id_ not in self.entries or id_ not in after:
                continue
            row = given[-1] if last else after[id_].row
            assert row in given, f"id {id_} has a row that nobody gave: {row} of {given}"
            self.entries[id_] = dataclasses.replace(self.entries[id_], row=row)

    def add_rows(self, ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Adds rows to the rows of existing ids."""
        for id_, row in zip(ids, rows, strict=True):
            entry = self.entries[id_]
            self.entries[id_] = dataclasses.replace(entry, row=self.add(entry.row, row))

    def select(
        self, score_below: int | None, score_at_least: int | None, older_than: int | None
    ) -> set[int]:
        """Returns ids that meet every given condition."""
        return {
            id_
            for id_, entry in self.entries.items()
            if (score_below is None or entry.score < score_below)
            and (score_at_least is None or entry.score >= score_at_least)
            and (older_than is None or self.calls - entry.touched > older_than)
        }

    def clear(self) -> None:
        """Clears the model."""
        self.entries.clear()
        self.admission.clear()
        if self.aged is not None:
            self.aged.restart()

    def reload(self) -> None:
        """Applies saving and loading of the table."""
        if self.aged is not None:
            self.aged.reload(self.calls, self.lookups)

    def erase(self, ids: Iterable[int]) -> None:
        """Erases ids."""
        for id_ in ids:
            self.entries.pop(id_, None)

    # -- the comparison ---------------------------------------------------------------------------

    def check(self, after: dict[int, ObservedEntry]) -> None:
        """Checks that the real table equals the model, and that no entry has moved."""
        assert after.keys() == self.entries.keys()
        for id_, seen in after.items():
            entry = self.entries[id_]
            assert seen.score == entry.score, f"id {id_}: score {seen.score}, not {entry.score}"
            assert seen.row == entry.row, f"id {id_}: row {seen.row}, not {entry.row}"
            assert 0 <= seen.slot < self.num_slots
            self.buckets.setdefault(id_, set()).add(seen.slot // self.bucket_slots)
            assert len(self.buckets[id_]) <= 2, f"id {id_} was met in three buckets"
        slots = {id_: seen.slot for id_, seen in after.items()}
        assert len(set(slots.values())) == len(slots), "two ids share a slot"
        self.slots = slots

    def forget_slots(self) -> None:
        """Forgets slots after the real table has grown, which changes them."""
        self.slots, self.buckets = {}, {}

    def check_nothing_moved(self, after: dict[int, ObservedEntry]) -> None:
        """Checks that ids which stay in the table keep their slots."""
        for id_, slot in self.slots.items():
            assert id_ not in after or after[id_].slot == slot, f"id {id_} has moved"
