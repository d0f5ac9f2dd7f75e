"""A TableGroup. Every call is compared with a model of each of its tables."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.checked_table import CheckedTable
from tests.support.table_model import POLICIES, TAKES_SCORES
from tests.support.table_observation import Row, signed
from torchrec_hkv.hash_table import Entries, Evicted, TableGroup, TableSpec, Uniform

SYMMETRIC = Uniform(-1, 1)


@dataclasses.dataclass(frozen=True)
class Part:
    """The arguments of a call for one table.

    Attributes:
        ids: ids of the table.
        rows: one row per id, if the call takes rows.
        scores: scores, if the policy takes scores and the call gives some.
        flags: one flag per id, if the call takes beliefs.
    """

    ids: list[int]
    rows: list[Row] | None = None
    scores: list[int] | None = None
    flags: list[bool] | None = None


class TableOfGroup:
    """One table of a group, with the parts of HashTable that a CheckedTable uses.

    ``answer`` gets the group call's results for this table, which any changing call returns.
    """

    def __init__(self, group: TableGroup, index: int) -> None:
        spec = group.tables[index]
        self.group, self.index = group, index
        self.dim, self.dtype, self.device = spec.dim, spec.dtype, group.device
        self.eviction = spec.eviction
        self.answer: Any = None
        for name in ("find_or_insert", "find_or_insert_slots", "insert_or_assign", "assign"):
            setattr(self, name, self._answer)
        for name in ("insert_and_evict", "accum_or_assign", "assign_rows", "assign_scores"):
            setattr(self, name, self._answer)
        for name in ("erase", "erase_if", "expire"):
            setattr(self, name, self._answer)

    def _answer(self, *_: Any, **__: Any) -> Any:
        return self.answer

    def _offsets(self, n: int) -> Tensor:
        before = torch.zeros(self.index + 1, dtype=torch.int64)
        after = torch.full((len(self.group.tables) - self.index,), n)
        return torch.cat([before, after]).to(self.device)

    def narrow(self, rows: Tensor) -> Tensor:
        """Converts rows of the group to rows of the table; other columns must be zeros."""
        assert not rows[:, self.dim :].any()
        return rows[:, : self.dim].to(self.dtype)

    @property
    def first_slot(self) -> int:
        return sum(map(self.group.full_slots, range(self.index)))

    def of_group(self, slots: Tensor) -> Tensor:
        """Converts slots of the group to slots of the table."""
        return torch.where(slots < 0, slots, slots - self.first_slot)

    def find_slots(self, ids: Tensor) -> Tensor:
        return self.of_group(self.group.find_slots(ids, self._offsets(len(ids)), 1))

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows, found = self.group.find_rows(ids, self._offsets(len(ids)), 1)
        return self.narrow(rows), found

    def find_missing(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.group.find_missing(ids, self._offsets(len(ids)), 1)

    def contains(self, ids: Tensor) -> Tensor:
        return self.group.contains(ids, self._offsets(len(ids)), 1)

    def export(self, batch_size: int) -> Iterator[Entries]:
        yield from self.export_if(batch_size=batch_size)

    def export_if(self, **conditions: Any) -> Iterator[Entries]:
        for part in self.group.export_if(tables=[self.index], **conditions):
            assert part.tables.tolist() == [self.index] * len(part.ids)
            yield Entries(part.ids, self.narrow(part.rows), part.scores, part.states)

    @property
    def size(self) -> int:
        return self.group.sizes()[self.index]

    @property
    def num_slots(self) -> int:
        return self.group.present_slots(self.index)

    @property
    def capacity(self) -> int:
        return self.group.full_slots(self.index)

    @property
    def load_factor(self) -> float:
        return self.size / self.capacity

    def counters(self) -> dict[str, int]:
        return self.group.counters()[self.index]


class CheckedGroup:
    """A group of tables with one feature each, and their models.

    Args:
        specs: the tables, whose names and seeds must be ``"checked"`` and 5.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, specs: Sequence[TableSpec], device: str) -> None:
        self.group = TableGroup(specs, range(len(specs)), device=device)
        self.tables = [TableOfGroup(self.group, index) for index in range(len(specs))]
        self.checked = [
            CheckedTable.of_table(table, spec, device)
            for table, spec in zip(self.tables, specs, strict=True)
        ]
        self.takes_scores = any(spec.eviction in TAKES_SCORES for spec in specs)

    def _joined(self, lists: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        values = [value for part in lists for value in part]
        return torch.tensor(values, dtype=dtype, device=self.group.device)

    def _ids(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor, int]:
        lengths = torch.tensor([0] + [len(part.ids) for part in parts])
        ids = self._joined([part.ids for part in parts])
        for checked in self.checked:
            checked.ids_of_group = ids.numel()
        return ids, lengths.cumsum(0).to(self.group.device), 1

    def _scores(self, parts: Sequence[Part]) -> Tensor | None:
        if all(part.scores is None for part in parts):
            return None
        # Tables that compute their own scores ignore the scores at their positions.
        scores = [part.scores or [77] * len(part.ids) for part in parts]
        return self._joined([[signed(score) for score in of_table] for of_table in scores])

    def _rows(self, parts: Sequence[Part]) -> Tensor:
        rows = [
            torch.tensor(part.rows, dtype=table.dtype, device=table.device).view(-1, table.dim)
            for part, table in zip(parts, self.tables, strict=True)
        ]
        joined = self.group.join_rows(rows)
        for table, part in zip(self.tables, joined.split([len(r) for r in rows]), strict=True):
            part[:, table.dim :] = float("nan")  # must not be read
        return joined

    def _answers(self, parts: Sequence[Part], *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Splits tensors by position into those of each table."""
        lengths = [len(part.ids) for part in parts]
        columns = [tensor.split(lengths) for tensor in tensors]
        yield from map(list, zip(*columns, strict=True))

    def find(self, parts: Sequence[Part]) -> None:
        """Compares one call for all tables with the models."""
        rows, found = self.group.find_rows(*self._ids(parts))
        slots = self.group.find_slots(*self._ids(parts))
        answers = self._answers(parts, rows, found, slots)
        for table, part, answer in zip(self.tables, parts, answers, strict=True):
            ids = self._joined([part.ids])
            its_rows, its_found = table.find(ids)
            assert torch.equal(table.narrow(answer[0]), its_rows)
            assert torch.equal(answer[1], its_found)
            assert torch.equal(table.of_group(answer[2]), table.find_slots(ids))
        for checked, part in zip(self.checked, parts, strict=True):
            checked.find(part.ids)

    def find_or_insert(self, parts: Sequence[Part]) -> None:
        rows, found = self.group.find_or_insert_rows(*self._ids(parts), self._scores(parts))
        for checked, part, (part_rows, hits) in self._each(parts, rows, found):
            checked.table.answer = checked.table.narrow(part_rows), hits
            checked.find_or_insert(part.ids, part.scores)

    def find_or_insert_slots(self, parts: Sequence[Part]) -> None:
        slots, found = self.group.find_or_insert_slots(*self._ids(parts), self._scores(parts))
        for checked, part, (part_slots, hits) in self._each(parts, slots, found):
            checked.table.answer = checked.table.of_group(part_slots), hits
            checked.find_or_insert_slots(part.ids, part.scores)

    def _each(
        self, parts: Sequence[Part], *tensors: Tensor
    ) -> Iterator[tuple[CheckedTable, Part, list[Tensor]]]:
        yield from zip(self.checked, parts, self._answers(parts, *tensors), strict=True)

    def insert_or_assign(self, parts: Sequence[Part]) -> None:
        placed = self.group.insert_or_assign(
            *self._ids(parts), self._rows(parts), self._scores(parts)
        )
        for checked, part, (part_placed,) in self._each(parts, placed):
            checked.table.answer = part_placed
            checked.insert_or_assign(part.ids, part.rows, part.scores)

    def insert_and_evict(self, parts: Sequence[Part]) -> None:
        back = self.group.insert_and_evict(
            *self._ids(parts), self._rows(parts), self._scores(parts)
        )
        for index, (checked, part) in enumerate(zip(self.checked, parts, strict=True)):
            of_table = back.tables == index
            rows = checked.table.narrow(back.rows[of_table])
            checked.table.answer = Evicted(
                back.ids[of_table], rows, back.scores[of_table], of_table.sum()
            )
            checked.insert_and_evict(part.ids, part.rows, part.scores)

    def accum_or_assign(self, parts: Sequence[Part]) -> None:
        flags = self._joined([part.flags for part in parts], torch.bool)
        self.group.accum_or_assign(*self._ids(parts), self._rows(parts), flags, self._scores(parts))
        for checked, part in zip(self.checked, parts, strict=True):
            checked.accum_or_assign(part.ids, part.rows, part.flags, part.scores)

    def assign(self, parts: Sequence[Part]) -> None:
        hits = self.group.assign(*self._ids(parts), self._rows(parts), self._scores(parts))
        for checked, part, (part_hits,) in self._each(parts, hits):
            checked.table.answer = part_hits
            checked.assign(part.ids, part.rows, part.scores)

    def assign_rows(self, parts: Sequence[Part]) -> None:
        hits = self.group.assign_rows(*self._ids(parts), self._rows(parts))
        for checked, part, (part_hits,) in self._each(parts, hits):
            checked.table.answer = part_hits
            checked.assign_rows(part.ids, part.rows)

    def assign_scores(self, parts: Sequence[Part]) -> None:
        hits = self.group.assign_scores(*self._ids(parts), self._scores(parts))
        for checked, part, (part_hits,) in self._each(parts, hits):
            checked.table.answer = part_hits
            checked.assign_scores(part.ids, part.scores)

    def erase(self, parts: Sequence[Part]) -> None:
        self.group.erase(*self._ids(parts))
        for checked, part in zip(self.checked, parts, strict=True):
            checked.erase(part.ids)

    def erase_if(self, **conditions: int) -> None:
        """Erases by the same conditions in all tables; the result is the sum."""
        expected = sum(len(checked._select(conditions)) for checked in self.checked)
        assert self.group.erase_if(**conditions) == expected
        for checked in self.checked:
            checked.table.answer = len(checked._select(conditions))
            checked.erase_if(**conditions)

    def export_if(self, batch_size: int, **conditions: int) -> None:
        """Exports all tables at once, then each separately."""
        parts = list(self.group.export_if(batch_size=batch_size, **conditions))
        assert all(1 <= len(part.ids) <= batch_size for part in parts)
        pairs = [
            pair
            for part in parts
            for pair in zip(part.tables.tolist(), part.ids.tolist(), strict=True)
        ]
        assert [table for table, _ in pairs] == sorted(table for table, _ in pairs)
        chosen = [checked._select(conditions) for checked in self.checked]
        assert sorted(pairs) == sorted(
            (t, id_) for t, table_ids in enumerate(chosen) for id_ in table_ids
        )
        for checked in self.checked:
            checked.export_if(batch_size, **conditions)

    def expire(self) -> None:
        """Removes all expired entries."""
        self.group.expire()
        for checked in self.checked:
            if checked.model.expire_after is not None:
                checked.expire()

    def next_epoch(self) -> None:
        """Begins a later epoch in all tables."""
        for checked in self.checked:
            checked.model.epoch += 1
        self.group.set_epoch(self.checked[0].model.epoch)


class GroupDriver:
    """Generates calls of a CheckedGroup.

    Args:
        checked: the group.
        seed: seed of the calls.
    """

    def __init__(self, checked: CheckedGroup, seed: int) -> None:
        self.checked, self.random = checked, random.Random(seed)
        self.pools = []
        for table in checked.checked:
            capacity = min(table.model.num_slots, 300)
            extremes = [-(2**63), 2**63 - 1, -1]
            self.pools.append([*range(-capacity // 2, capacity), *extremes])

    def _part(self, index: int, name: str, with_scores: bool) -> Part:
        checked = self.checked.checked[index]
        spec = self.checked.group.tables[index]
        # Some tables get no ids, some get more than they can hold.
        size = self.random.choice([0, 3, min(100, len(self.pools[index]) // 3)])
        ids = self.random.choices(self.pools[index], k=self.random.randint(0, size))
        ids += ids[: self.random.choice([0, 0, 1, 50])]
        flags = None
        if name == "accum_or_assign":
            ids = list(dict.fromkeys(ids))
            there = [id_ in checked.model.entries for id_ in ids]
            flags = [hit != (self.random.random() < 0.1) for hit in there]
        rows = [tuple(float(self.random.randint(-99, 99)) for _ in range(spec.dim)) for _ in ids]
        scores = None
        if with_scores and spec.eviction in TAKES_SCORES:
            extreme = -5 if spec.eviction == "customized" else 2**63 - 5
            scores = [self.random.choice([0, 1, 2, 3, 4, extreme]) for _ in ids]
        return Part(ids, rows, scores, flags)

    def call(self) -> None:
        """Runs one random call."""
        calls: dict[str, Callable[[], None]] = {
            "select": self._select,
            "next_epoch": self.checked.next_epoch,
            "expire": self.checked.expire,
        }
        with_ids = ["find", "find_or_insert", "find_or_insert_slots", "insert_or_assign"]
        with_ids += ["insert_and_evict", "insert_and_evict", "accum_or_assign", "assign"]
        with_ids += ["assign_rows", "assign_scores", "erase"]
        name = self.random.choice([*calls, *with_ids])
        if name in calls:
            calls[name]()
            return
        needed = any(spec.eviction == "customized" for spec in self.checked.group.tables)
        with_scores = needed or (self.checked.takes_scores and self.random.random() < 0.5)
        tables = range(len(self.checked.tables))
        getattr(self.checked, name)([self._part(t, name, with_scores) for t in tables])

    def _select(self) -> None:
        scores = [e.score for c in self.checked.checked for e in c.model.entries.values()]
        low = sorted(scores)[len(scores) // 20] if scores else 0
        self.checked.export_if(1 + self.random.randrange(200), score_at_least=low)
        self.checked.export_if(50, score_at_least=low, older_than=1)
        self.checked.erase_if(score_below=low, older_than=2)


def random_specs(number: int, seed: int, policies: Sequence[str] = POLICIES) -> list[TableSpec]:
    """Creates tables with random dims, capacities and policies."""
    draw = random.Random(seed)
    return [
        TableSpec(
            "checked",
            draw.choice([1, 5, 64, 100, 300]),
            draw.choice([1, 2, 3, 4, 8, 17]),
            eviction=draw.choice(policies),
            seed=5,
            initializer=SYMMETRIC,
        )
        for _ in range(number)
    ]
