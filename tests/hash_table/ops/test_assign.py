"""assign, assign_rows and assign_scores change existing entries, and insert nothing."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import (
    constant_scores,
    contents,
    distinct_ids,
    make,
    random_rows,
    scores_of,
    scores_tensor,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("operation", ["assign", "assign_rows"])
def test_rows_of_hits_only(device_type, policy, operation):
    table = make(device_type, 600, dim=5, eviction=policy)
    ids = distinct_ids(501, device_type)
    old, new = random_rows(table, 301), random_rows(table, 401)
    table.insert_or_assign(ids[:301], old, constant_scores(table, 301))
    if operation == "assign":
        hits = table.assign(ids[100:], new, constant_scores(table, 401))
    else:
        hits = table.assign_rows(ids[100:], new)
    assert hits.tolist() == [True] * 201 + [False] * 200
    assert table.size == 301
    assert table.contains(ids).sum() == 301
    assert torch.equal(table.find(ids[:301])[0], torch.cat([old[:100], new[:201]]))


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_alone_leave_scores_and_ages(device_type, policy):
    table = make(device_type, eviction=policy)
    ids = distinct_ids(60, device_type)
    table.insert_or_assign(ids[:20], random_rows(table, 20), constant_scores(table, 20))
    table.insert_or_assign(ids[20:40], random_rows(table, 20), constant_scores(table, 20))
    before = scores_of(table)
    for _ in range(3):
        table.assign_rows(ids, random_rows(table, 60))
    assert scores_of(table) == before
    assert table.erase_if(older_than=1) == 0
    assert table.erase_if(older_than=0) == 20


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_alone_leave_rows(device_type, policy):
    table = make(device_type, 600, dim=5, eviction=policy, state_dim=2)
    ids = distinct_ids(501, device_type)
    rows = random_rows(table, 301)
    table.insert_or_assign(ids[:301], rows, constant_scores(table, 301))
    hits = table.assign_scores(ids[100:], constant_scores(table, 401, score=9))
    assert hits.tolist() == [True] * 201 + [False] * 200
    assert table.size == 301
    assert torch.equal(table.find(ids[:301])[0], rows)


def test_scores_as_a_hit_sets_them(device_type):
    expected = {"lru": (1, 2), "lfu": (1, 2), "epoch_lru": (1, 2), "epoch_lfu": (1, 2)}
    expected["customized"] = (5, 9)
    for policy, (before, after) in expected.items():
        for operation in ("assign", "assign_scores"):
            table = make(device_type, eviction=policy)
            ids = distinct_ids(40, device_type)
            table.find_or_insert(ids[:30], constant_scores(table, 30, score=5))
            scores = constant_scores(table, 30, score=9)
            if operation == "assign":
                table.assign(ids[10:], random_rows(table, 30), scores)
            else:
                table.assign_scores(ids[10:], scores)
            found = scores_of(table)
            assert [found[id_] for id_ in ids[:30].tolist()] == [before] * 10 + [after] * 20


def test_given_scores(device_type):
    scores = [0, 1, 2**32, 2**63 - 1, -(2**63), -1]
    ids = distinct_ids(6, device_type)
    table = make(device_type, eviction="customized")
    table.find_or_insert(ids, constant_scores(table, 6))
    table.assign_scores(ids, scores_tensor(scores, device_type))
    assert [scores_of(table)[id_] for id_ in ids.tolist()] == scores
    table.assign(ids, random_rows(table, 6), scores_tensor(scores[::-1], device_type))
    assert [scores_of(table)[id_] for id_ in ids.tolist()] == scores[::-1]


def test_assigning_protects_from_eviction(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(84, device_type)
    for id_ in ids[:64].split(1):
        table.find_or_insert(id_)
    table.assign_scores(ids[:10])
    table.assign(ids[10:20], random_rows(table, 10))
    table.assign_rows(ids[20:30], random_rows(table, 10))
    table.find_or_insert(ids[64:])
    removed = set(ids[20:40].tolist())
    assert contents(table).keys() == set(ids.tolist()) - removed


@pytest.mark.parametrize("operation", ["assign", "assign_rows"])
def test_duplicates_leave_one_row_whole(device_type, operation):
    table = make(device_type, 400, dim=65)
    ids = distinct_ids(301, device_type)
    table.find_or_insert(ids)
    order = torch.cat([torch.arange(301), torch.randint(0, 301, (5000,))]).to(device_type)
    rows = torch.arange(5301.0, device=device_type)[:, None].expand(-1, 65).contiguous()
    assert getattr(table, operation)(ids[order], rows).all()
    found_rows, _ = table.find(ids)
    assert (found_rows == found_rows[:, :1]).all()
    assert torch.equal(order[found_rows[:, 0].long()].cpu(), torch.arange(301))


def test_an_empty_call(device_type):
    table = make(device_type)
    none = distinct_ids(0, device_type)
    assert table.assign(none, random_rows(table, 0)).shape == (0,)
    assert table.assign_rows(none, random_rows(table, 0)).shape == (0,)
    assert table.assign_scores(none).shape == (0,)
