"""A group's call does the same as one call for each table, on separate tables."""

import pytest
import torch

from tests.support.batches import random_ids
from tests.support.tables import contents
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec, Uniform

NUMBERS = [1, 2, 7, 64]


class Twins:
    """A group, and a separate copy of each of its tables, large enough that nothing is evicted."""

    def __init__(self, number: int, device: str) -> None:
        self.device, self.initializer = device, Uniform(-1, 1)
        specs = [
            TableSpec(f"t{t}", 2000 + 64 * t, 1 + 3 * t % 24, initializer=self.initializer, seed=t)
            for t in range(number)
        ]
        self.group = TableGroup(specs, range(number), device=device, state_dim=2)
        self.tables = [
            HashTable(
                spec.dim,
                spec.capacity,
                device=device,
                name=spec.name,
                seed=spec.seed,
                initializer=self.initializer,
                state_dim=2,
            )
            for spec in specs
        ]

    def batch(self, minimum: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids with repetitions; every third table gets none."""
        lengths = [0 if t % 3 == 2 else minimum + (37 * t) % 90 for t in range(len(self.tables))]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids = random_ids(200)[torch.randint(200, (int(offsets[-1]),))]
        return ids.to(self.device), offsets.to(self.device), 1

    def parts(self, batch: tuple[torch.Tensor, torch.Tensor, int]) -> list[torch.Tensor]:
        ids, offsets, _ = batch
        return list(ids.split(offsets.diff().tolist()))

    def rows(self, batch: tuple[torch.Tensor, torch.Tensor, int]) -> list[torch.Tensor]:
        """One row for each id, whatever its positions."""
        return [
            (torch.arange(table.dim, device=self.device) + part[:, None] % 1000).float()
            for table, part in zip(self.tables, self.parts(batch), strict=True)
        ]

    def check(self) -> None:
        exported: list[dict[int, object]] = [{} for _ in self.tables]
        for part in self.group.export(batch_size=997):
            columns = zip(
                part.tables.tolist(),
                part.ids.tolist(),
                part.rows.tolist(),
                part.scores.tolist(),
                part.states.tolist(),
                strict=True,
            )
            for table, id_, row, score, state in columns:
                dim = self.tables[table].dim
                assert row[dim:] == [0.0] * (self.group.row_width - dim)
                exported[table][id_] = (tuple(row[:dim]), score, tuple(state))
        for table, its in zip(self.tables, exported, strict=True):
            assert contents(table) == its
        assert [table.counters() for table in self.tables] == self.group.counters()


@pytest.fixture(params=NUMBERS)
def twins(request, device_type):
    twins = Twins(request.param, device_type)
    batch = twins.batch(minimum=50)
    rows = twins.rows(batch)
    twins.group.insert_or_assign(*batch, twins.group.join_rows(rows))
    for table, ids, its in zip(twins.tables, twins.parts(batch), rows, strict=True):
        table.insert_or_assign(ids, its)
    twins.check()
    return twins


def split(twins, batch, values):
    return values.split([len(part) for part in twins.parts(batch)])


def test_lookups(twins):
    batch = twins.batch()
    ids, offsets, size = batch
    rows, found = twins.group.find_rows(*batch)
    by_feature = twins.group.split_rows(rows, offsets, size)
    there = split(twins, batch, twins.group.contains(*batch))
    assert torch.equal(torch.cat(there), found)
    for table, part, its, hits in zip(
        twins.tables, twins.parts(batch), by_feature, there, strict=True
    ):
        expected, expected_hits = table.find(part)
        assert torch.equal(its, expected)
        assert torch.equal(hits, expected_hits)
    missing, positions = twins.group.find_missing(*batch)
    assert torch.equal(positions, (~found).nonzero().flatten())
    assert torch.equal(missing, ids[positions])
    twins.check()


def test_find_or_insert(twins):
    batch = twins.batch()
    rows, found = twins.group.find_or_insert_rows(*batch)
    by_feature = twins.group.split_rows(rows, *batch[1:])
    for table, part, its, hits in zip(
        twins.tables, twins.parts(batch), by_feature, split(twins, batch, found), strict=True
    ):
        expected, expected_hits = table.find_or_insert(part)
        assert torch.equal(its, expected)
        assert torch.equal(hits, expected_hits)
    twins.check()


@pytest.mark.parametrize("operation", ["insert_or_assign", "assign", "assign_rows"])
def test_rows_are_set(twins, operation):
    batch = twins.batch()
    rows = twins.rows(batch)
    answer = getattr(twins.group, operation)(*batch, twins.group.join_rows(rows))
    for table, part, its, said in zip(
        twins.tables, twins.parts(batch), rows, split(twins, batch, answer), strict=True
    ):
        assert torch.equal(getattr(table, operation)(part, its), said)
    twins.check()


def test_rows_are_added(twins):
    batch = twins.batch()
    rows = twins.rows(batch)
    there = twins.group.contains(*batch)
    twins.group.accum_or_assign(*batch, twins.group.join_rows(rows), there)
    for table, part, its, hits in zip(
        twins.tables, twins.parts(batch), rows, split(twins, batch, there), strict=True
    ):
        table.accum_or_assign(part, its, hits)
    twins.check()


def test_scores_and_erasure(twins):
    batch, removed = twins.batch(), twins.batch()
    answer = twins.group.assign_scores(*batch)
    for table, part, said in zip(
        twins.tables, twins.parts(batch), split(twins, batch, answer), strict=True
    ):
        assert torch.equal(table.assign_scores(part), said)
    twins.group.erase(*removed)
    for table, part in zip(twins.tables, twins.parts(removed), strict=True):
        table.erase(part)
    twins.check()
    assert twins.group.erase_if(older_than=0) == sum(
        table.erase_if(older_than=0) for table in twins.tables
    )
    twins.check()


def test_nothing_is_given_back_where_there_is_room(twins):
    batch = twins.batch()
    rows = twins.rows(batch)
    back = twins.group.insert_and_evict(*batch, twins.group.join_rows(rows))
    assert back.ids.numel() == back.tables.numel() == int(back.count) == 0
    for table, part, its in zip(twins.tables, twins.parts(batch), rows, strict=True):
        table.insert_and_evict(part, its)
    twins.check()


def test_a_call_without_ids(twins):
    none = torch.zeros(0, dtype=torch.int64, device=twins.device)
    offsets = torch.zeros(len(twins.tables) + 1, dtype=torch.int64, device=twins.device)
    rows = twins.group.row_width
    rows = torch.zeros(0, rows, device=twins.device)
    assert twins.group.find_rows(none, offsets, 1)[0].shape == rows.shape
    assert twins.group.insert_or_assign(none, offsets, 1, rows).numel() == 0
    assert int(twins.group.insert_and_evict(none, offsets, 1, rows).count) == 0
    twins.group.erase(none, offsets, 1)
    for table in twins.tables:
        table.insert_or_assign(none, rows[:, : table.dim])
        table.insert_and_evict(none, rows[:, : table.dim])
    twins.check()
