"""A large call of one id or of few leaves one entry for each."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import (
    constant_scores,
    contents,
    expected_initial_rows,
    make,
    random_rows,
)

MANY = 200_001


@pytest.mark.parametrize("policy", POLICIES)
def test_find_or_insert(device_type, policy):
    table = make(device_type, 64, dim=3, eviction=policy)
    ids = torch.full((MANY,), -1, device=device_type)
    scores = constant_scores(table, MANY, score=9)
    for turn in range(2):
        rows, found = table.find_or_insert(ids, scores)
        assert found.all() if turn else not found.any()
        assert (rows == expected_initial_rows(table, ids[:1])).all()
        assert table.size == 1
    ((_, score, _),) = contents(table).values()
    expected = {"lru": 2, "epoch_lru": 2, "customized": 9}
    assert score == expected.get(policy, 2 * MANY)


@pytest.mark.parametrize("policy", POLICIES)
def test_insertions(device_type, policy):
    table = make(device_type, 64, dim=3, eviction=policy)
    ids = torch.full((MANY,), -1, device=device_type)
    scores = constant_scores(table, MANY)
    rows = torch.arange(float(MANY), device=device_type)[:, None].expand(-1, 3).contiguous()
    for turn in range(2):
        rows = rows + turn
        assert table.insert_or_assign(ids, rows, scores).all()
        found, _ = table.find(ids[:1])
        assert (found == found[0, 0]).all()
        assert len(table.insert_and_evict(ids, rows, scores).ids) == 0
        assert table.size == 1


def test_sums(device_type):
    table = make(device_type, 64, dim=3)
    ids = torch.full((MANY,), -1, device=device_type)
    table.insert_or_assign(ids[:1], torch.zeros(1, 3, device=device_type))
    ones = torch.ones(MANY, 3, device=device_type)
    table.accum_or_assign(ids, ones, torch.ones(MANY, dtype=torch.bool, device=device_type))
    assert torch.equal(table.find(ids[:1])[0], torch.full((1, 3), float(MANY), device=device_type))


def test_refused(device_type):
    """A new id that fills a call and gets no slot is refused at every position."""
    table = make(device_type, 64, dim=3, eviction="customized")
    old = torch.arange(64, device=device_type)
    table.find_or_insert(old, constant_scores(table, 64, score=10))
    ids = torch.full((MANY,), -1, device=device_type)
    assert not table.insert_or_assign(
        ids, random_rows(table, MANY), constant_scores(table, MANY)
    ).any()
    assert contents(table).keys() == set(range(64))


def test_erase(device_type):
    table = make(device_type, 64)
    table.find_or_insert(torch.tensor([-1, 5], device=device_type))
    table.erase(torch.full((MANY,), -1, device=device_type))
    assert contents(table).keys() == {5}
