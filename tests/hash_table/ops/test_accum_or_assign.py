"""accum_or_assign adds to present ids and assigns to missing ones, as the caller expects them."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, contents, distinct_ids, make, random_rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_adds_and_assigns(device_type, policy, dim):
    table = make(device_type, 600, dim, eviction=policy)
    ids = distinct_ids(501, device_type)
    old, new = random_rows(table, 201), random_rows(table, 501)
    table.insert_or_assign(ids[:201], old, constant_scores(table, 201))
    accumulate = torch.arange(501, device=device_type) < 201
    table.accum_or_assign(ids, new, accumulate, constant_scores(table, 501))
    assert table.size == 501
    rows, found = table.find(ids)
    assert found.all()
    assert torch.equal(rows, torch.cat([old + new[:201], new[201:]]))


def test_a_wrong_belief_does_nothing(device_type):
    table = make(device_type, eviction="lfu")
    ids = distinct_ids(40, device_type)
    table.insert_or_assign(ids[:20], random_rows(table, 20))
    before = contents(table)
    accumulate = torch.arange(40, device=device_type) >= 20
    table.accum_or_assign(ids, random_rows(table, 40), accumulate)
    assert contents(table) == before


def test_scores_of_those_that_take_part(device_type):
    table = make(device_type, eviction="lfu")
    ids = distinct_ids(30, device_type)
    table.insert_or_assign(ids[:20], random_rows(table, 20))
    accumulate = torch.arange(30, device=device_type) < 10
    counts = torch.arange(1, 31, device=device_type)
    table.accum_or_assign(ids, random_rows(table, 30), accumulate, counts)
    scores = {id_: score for id_, (_, score, _) in contents(table).items()}
    expected = [1 + at + 1 for at in range(10)] + [1] * 10 + list(range(21, 31))
    assert [scores[id_] for id_ in ids.tolist()] == expected


def test_duplicates_all_add(device_type):
    table = make(device_type, 400, dim=5)
    ids = distinct_ids(301, device_type)
    table.insert_or_assign(ids, torch.ones(301, 5, device=device_type))
    order = torch.randint(0, 301, (20_000,), device=device_type)
    rows = (torch.arange(20_000, device=device_type) % 7)[:, None].float().expand(-1, 5)
    rows = rows.contiguous()
    table.accum_or_assign(ids[order], rows, torch.ones_like(order, dtype=torch.bool))
    expected = torch.ones(301, 5, device=device_type).index_add_(0, order, rows)
    assert torch.equal(table.find(ids)[0], expected)


def test_duplicates_of_a_new_id_end_as_one_row(device_type):
    table = make(device_type, 400, dim=33)
    ids = distinct_ids(301, device_type)
    order = torch.cat([torch.arange(301), torch.randint(0, 301, (5000,))]).to(device_type)
    rows = torch.arange(5301.0, device=device_type)[:, None].expand(-1, 33).contiguous()
    table.accum_or_assign(ids[order], rows, torch.zeros_like(order, dtype=torch.bool))
    assert table.size == 301
    found_rows, _ = table.find(ids)
    assert (found_rows == found_rows[:, :1]).all()
    assert torch.equal(order[found_rows[:, 0].long()].cpu(), torch.arange(301))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_rows_are_rounded_once(device_type, dtype):
    table = make(device_type, 600, dim=9, dtype=dtype)
    ids = distinct_ids(501, device_type)
    old, new = random_rows(table, 501), random_rows(table, 501)
    table.insert_or_assign(ids, old)
    table.accum_or_assign(ids, new, torch.ones(501, dtype=torch.bool, device=device_type))
    assert torch.equal(table.find(ids)[0], (old.float() + new.float()).to(dtype))


def test_an_empty_call(device_type):
    table = make(device_type)
    none = torch.zeros(0, dtype=torch.bool, device=device_type)
    table.accum_or_assign(distinct_ids(0, device_type), random_rows(table, 0), none)
    assert table.size == 0
