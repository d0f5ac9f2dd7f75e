"""A HashTable. Every call is compared with a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.admission_model import admission_model
from tests.support.initial_value import initial_value
from tests.support.table_model import Insertion, TableModel, one_of_each
from tests.support.table_observation import (
    ObservedEntry,
    Row,
    as_rows,
    joined,
    observe,
    score_of,
    signed,
)
from torchrec_hkv.hash_table import (
    Admission,
    Constant,
    Evicted,
    EvictionPolicy,
    HashTable,
    TableSpec,
    Uniform,
)

SYMMETRIC = Uniform(-1, 1)


class CheckedTable:
    """A table and its model; takes Python numbers.

    Args:
        policy: the eviction policy.
        capacity: argument of the table.
        dim: argument of the table.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: dtype of rows.
        initializer: distribution of initial rows.
        admission: argument of the table.
        expire_after: argument of the table.
        initial_capacity: argument of the table.
        hbm_bytes: argument of the table.
        deterministic: argument of the table.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity: int,
        dim: int = 2,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        initializer: Uniform | Constant = SYMMETRIC,
        admission: Admission | None = None,
        expire_after: int | None = None,
        initial_capacity: int | None = None,
        hbm_bytes: int | None = None,
        deterministic: bool = False,
    ) -> None:
        spec = TableSpec(
            "checked",
            capacity,
            dim,
            eviction=policy,
            seed=5,
            initializer=initializer,
            dtype=dtype,
            admission=admission,
            expire_after=expire_after,
            initial_capacity=initial_capacity,
            hbm_bytes=hbm_bytes,
            deterministic=deterministic,
        )
        self.table = HashTable(
            dim,
            capacity,
            device=device,
            dtype=dtype,
            eviction=policy,
            name=spec.name,
            seed=spec.seed,
            initializer=initializer,
            admission=admission,
            expire_after=expire_after,
            initial_capacity=initial_capacity,
            hbm_bytes=hbm_bytes,
            deterministic=deterministic,
        )
        self._watch(spec, device)

    @classmethod
    def of_table(cls, table: Any, spec: TableSpec, device: str) -> CheckedTable:
        """Checks the calls of ``table``, which must be empty and match ``spec``."""
        checked = cls.__new__(cls)
        checked.table = table
        checked._watch(spec, device)
        return checked

    def _watch(self, spec: TableSpec, device: str) -> None:
        @functools.cache
        def initial_row(id_: int) -> Row:
            row = [initial_value(id_, c, "checked", 5, spec.initializer) for c in range(spec.dim)]
            return tuple(torch.tensor(row).to(spec.dtype).tolist())

        def add(row: Row, other: Row) -> Row:
            return tuple((torch.tensor(row) + torch.tensor(other)).to(spec.dtype).tolist())

        self.on_cpu = device == "cpu"
        admits = admission_model(spec.admission, "checked", 5)
        self.model = TableModel(
            spec.eviction,
            spec.capacity,
            initial_row,
            add,
            self.on_cpu,
            admits,
            spec.expire_after,
            spec.initial_capacity,
        )
        assert self.table.capacity == self.model.num_slots
        self.first_slots = self.slots = self.table.num_slots
        # Number of ids of the call in all tables of the group; None without a group.
        self.ids_of_group: int | None = None

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.table.device)

    def _rows(self, rows: Sequence[Row]) -> Tensor:
        tensor = torch.tensor(rows, dtype=self.table.dtype, device=self.table.device)
        return tensor.reshape(len(rows), self.table.dim)

    def _scores(self, scores: Sequence[int] | None) -> Tensor | None:
        return None if scores is None else self._ids([signed(score) for score in scores])

    def _rows_or_initial(self, ids: Sequence[int]) -> list[Row]:
        entries = self.model.entries
        return [entries[i].row if i in entries else self.model.initial_row(i) for i in ids]

    def check(self) -> None:
        """Compares the table's whole contents with the model."""
        after = observe(self.table)
        self.model.check(after)
        self._check_sizes()

    def _check_sizes(self) -> None:
        table, model = self.table, self.model
        assert table.size == len(model.entries)
        assert table.load_factor == len(model.entries) / model.num_slots
        counters = table.counters()
        assert counters["lookups"] == model.lookups
        assert counters["inserted"] == model.inserted
        assert counters["evicted"] == model.evicted
        assert counters["unadmitted"] == model.unadmitted
        assert counters["expired"] == model.expired
        if model.exact:
            assert counters["refused"] == model.refused

    def _after_insertion(
        self, ids: Sequence[int], scores: Sequence[int] | None, named: int | None = None
    ) -> tuple[Insertion, dict[int, ObservedEntry]]:
        after = observe(self.table)
        self._notice_growth()
        self.model.check_nothing_moved(after)
        named = named if self.ids_of_group is None else self.ids_of_group
        insertion = self.model.insert(ids, scores, after, self.table.num_slots, named)
        slots, capacity = self.table.num_slots, self.table.capacity
        assert slots == capacity or len(self.model.entries) <= slots - slots // 8
        assert slots == capacity or self.table.counters()["refused"] == 0
        return insertion, after

    def _notice_growth(self) -> None:
        if self.table.num_slots != self.slots:
            assert self.table.num_slots % (2 * self.slots) == 0
            self.slots = self.table.num_slots
            self.model.forget_slots()

    # -- lookups ----------------------------------------------------------------------------------

    def find(self, ids: Sequence[int]) -> None:
        """Checks find, find_slots, find_missing and contains."""
        there = [id_ in self.model.entries for id_ in ids]
        rows, found = self.table.find(self._ids(ids))
        assert found.tolist() == there
        assert as_rows(rows) == self._rows_or_initial(ids)
        slots = self.table.find_slots(self._ids(ids)).tolist()
        assert slots == [self.model.slots.get(id_, -1) for id_ in ids]
        missing, positions = self.table.find_missing(self._ids(ids))
        expected = [at for at, hit in enumerate(there) if not hit]
        assert positions.tolist() == expected
        assert missing.tolist() == [ids[at] for at in expected]
        assert self.table.contains(self._ids(ids)).tolist() == there
        self.check()

    def find_or_insert(self, ids: Sequence[int], scores: Sequence[int] | None = None) -> None:
        """Compares rows and found."""
        self.model.begin_call()
        rows, found = self.table.find_or_insert(self._ids(ids), self._scores(scores))
        insertion, after = self._after_insertion(ids, scores)
        assert found.tolist() == insertion.found
        self.model.check(after)
        for at, row in enumerate(as_rows(rows)):
            assert row == self._rows_or_initial([ids[at]])[0]
        self._check_sizes()

    def find_or_insert_slots(self, ids: Sequence[int], scores: Sequence[int] | None = None) -> None:
        """Compares slots and found."""
        self.model.begin_call()
        slots, found = self.table.find_or_insert_slots(self._ids(ids), self._scores(scores))
        insertion, after = self._after_insertion(ids, scores)
        assert found.tolist() == insertion.found
        self._check_placed([slot >= 0 for slot in slots.tolist()], ids, insertion, after)
        for id_, slot in zip(ids, slots.tolist(), strict=True):
            assert slot == -1 or slot == after[id_].slot
        self.model.check(after)
        self._check_sizes()

    # -- insertions -------------------------------------------------------------------------------

    def _check_placed(
        self,
        placed: list[bool],
        ids: Sequence[int],
        insertion: Insertion,
        after: dict[int, ObservedEntry],
    ) -> None:
        assert placed == insertion.placed
        for id_, occurrences in one_of_each(ids, placed).items():
            assert any(occurrences) == (id_ in after)

    def insert_or_assign(
        self, ids: Sequence[int], rows: Sequence[Row], scores: Sequence[int] | None = None
    ) -> None:
        """Compares which ids were placed."""
        self.model.begin_call()
        placed = self.table.insert_or_assign(self._ids(ids), self._rows(rows), self._scores(scores))
        insertion, after = self._after_insertion(ids, scores)
        self._check_placed(placed.tolist(), ids, insertion, after)
        self.model.set_rows(ids, rows, after, last=self.on_cpu)
        self.model.check(after)
        self._check_sizes()

    def insert_and_evict(
        self, ids: Sequence[int], rows: Sequence[Row], scores: Sequence[int] | None = None
    ) -> None:
        """Compares the returned entries."""
        self.model.begin_call()
        back = self.table.insert_and_evict(self._ids(ids), self._rows(rows), self._scores(scores))
        insertion, after = self._after_insertion(ids, scores)
        self._check_given_back(back, ids, rows, insertion)
        self.model.set_rows(ids, rows, after, last=self.on_cpu)
        self.model.check(after)
        self._check_sizes()

    def _check_given_back(
        self,
        back: Evicted,
        ids: Sequence[int],
        rows: Sequence[Row],
        insertion: Insertion,
    ) -> None:
        scores = (score_of(score, self.model.policy) for score in back.scores.tolist())
        given_back = list(zip(back.ids.tolist(), as_rows(back.rows), scores, strict=True))
        evicted = [(id_, entry.row, entry.score) for id_, entry in insertion.evicted.items()]
        refused = [
            (ids[at], rows[at], insertion.first_scores[at])
            for at, placed in enumerate(insertion.placed)
            if not placed
        ]
        assert sorted(given_back) == sorted(evicted + refused)

    def accum_or_assign(
        self,
        ids: Sequence[int],
        rows: Sequence[Row],
        accumulate: Sequence[bool],
        scores: Sequence[int] | None = None,
    ) -> None:
        """Checks that only ids with a right belief take part."""
        self.model.begin_call()
        entries = self.model.entries
        chosen = [at for at, add in enumerate(accumulate) if add == (ids[at] in entries)]
        flags = torch.tensor(accumulate, dtype=torch.bool, device=self.table.device)
        self.table.accum_or_assign(self._ids(ids), self._rows(rows), flags, self._scores(scores))
        part = None if scores is None else [scores[at] for at in chosen]
        _, after = self._after_insertion([ids[at] for at in chosen], part, len(ids))
        add = [at for at in chosen if accumulate[at]]
        new = [at for at in chosen if not accumulate[at]]
        self.model.add_rows([ids[at] for at in add], [rows[at] for at in add])
        self.model.set_rows([ids[at] for at in new], [rows[at] for at in new], after, last=False)
        self.model.check(after)
        self._check_sizes()

    # -- changes of entries -----------------------------------------------------------------------

    def _check_hits(self, hits: Tensor, ids: Sequence[int]) -> None:
        assert hits.tolist() == [id_ in self.model.entries for id_ in ids]

    def assign(
        self, ids: Sequence[int], rows: Sequence[Row], scores: Sequence[int] | None = None
    ) -> None:
        """Compares which ids were found."""
        self.model.begin_call()
        hits = self.table.assign(self._ids(ids), self._rows(rows), self._scores(scores))
        self._check_hits(hits, ids)
        after = observe(self.table)
        self.model.touch(ids, scores, after)
        self.model.set_rows(ids, rows, after, last=False)
        self.model.check_nothing_moved(after)
        self.check()

    def assign_rows(self, ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Compares which ids were found."""
        self._check_hits(self.table.assign_rows(self._ids(ids), self._rows(rows)), ids)
        self.model.set_rows(ids, rows, observe(self.table), last=False)
        self.check()

    def assign_scores(self, ids: Sequence[int], scores: Sequence[int] | None = None) -> None:
        """Compares which ids were found."""
        self.model.begin_call()
        self._check_hits(self.table.assign_scores(self._ids(ids), self._scores(scores)), ids)
        self.model.touch(ids, scores, observe(self.table))
        self.check()

    def erase(self, ids: Sequence[int]) -> None:
        """Erases ids."""
        self.table.erase(self._ids(ids))
        self.model.erase(ids)
        self.check()

    def erase_if(self, **conditions: int | None) -> None:
        """Compares the number of erased entries."""
        chosen = self._select(conditions)
        if not any(bound is not None for bound in conditions.values()):
            with pytest.raises(ValueError, match="no condition"):
                self.table.erase_if(**conditions)
            return
        assert self.table.erase_if(**conditions) == len(chosen)
        self.model.erase(chosen)
        self.check()

    def _select(self, conditions: dict[str, int | None]) -> set[int]:
        names = ("score_below", "score_at_least", "older_than")
        return self.model.select(*(conditions.get(name) for name in names))

    def export_if(self, batch_size: int, **conditions: int | None) -> None:
        """Compares ids, rows and scores."""
        parts = list(self.table.export_if(**conditions, batch_size=batch_size))
        assert all(1 <= part.ids.numel() <= batch_size for part in parts)
        entries = joined(parts)
        exported = []
        if entries is not None:
            scores = (score_of(score, self.model.policy) for score in entries.scores.tolist())
            exported = list(zip(entries.ids.tolist(), as_rows(entries.rows), scores, strict=True))
        chosen = {id_: self.model.entries[id_] for id_ in self._select(conditions)}
        assert sorted(exported) == sorted((i, e.row, e.score) for i, e in chosen.items())

    def expire(self) -> None:
        """Removes all expired entries."""
        self.table.expire()
        self.model.expire()
        self.check()

    def clear(self) -> None:
        """Clears the table."""
        self.table.clear()
        self.model.clear()
        self.check()

    def reserve(self, rows: int) -> None:
        """Grows the table if needed."""
        self.table.reserve(rows)
        self._notice_growth()
        self.check()

    def reload(self, folder: os.PathLike[str]) -> None:
        """Saves the table and loads it again."""
        self.table.save(folder)
        self.table.load(folder)
        self.model.reload()
        self._notice_growth()
        self.check()

    def next_epoch(self, by: int = 1) -> None:
        """Begins a later epoch."""
        self.table.epoch += by
        self.model.epoch += by
