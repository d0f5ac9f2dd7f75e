"""insert_or_assign stores its rows, whatever the number of ids and columns."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, distinct_ids, make, random_rows


@pytest.mark.parametrize("dim", [1, 3, 64, 130])
@pytest.mark.parametrize("n", [1, 7, 255, 2049])
def test_round_trip(device_type, n, dim):
    table = make(device_type, 2 * n + 100, dim)
    ids = distinct_ids(n, device_type)
    rows = random_rows(table, n)
    assert table.insert_or_assign(ids, rows).tolist() == [True] * n
    assert table.size == n
    found_rows, found = table.find(ids)
    assert found.all()
    assert torch.equal(found_rows, rows)


@pytest.mark.parametrize("dim", [2047, 2048])
def test_the_widest_rows(device_type, dim):
    table = make(device_type, 150, dim)
    ids = distinct_ids(101, device_type)
    rows = random_rows(table, 101)
    table.insert_or_assign(ids, rows)
    assert torch.equal(table.find(ids)[0], rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hit_overwrites_the_row(device_type, policy):
    table = make(device_type, 600, eviction=policy)
    ids = distinct_ids(501, device_type)
    rows = random_rows(table, 501)
    table.insert_or_assign(ids[:301], rows[:301], constant_scores(table, 301))
    rows[100:] = random_rows(table, 401)
    placed = table.insert_or_assign(ids[100:], rows[100:], constant_scores(table, 401))
    assert placed.all()
    assert table.size == 501
    assert torch.equal(table.find(ids)[0], rows)


@pytest.mark.parametrize("there", [False, True])
def test_duplicates_end_as_one_entry_with_one_row_whole(device_type, there):
    table = make(device_type, 400, dim=65)
    ids = distinct_ids(301, device_type)
    if there:
        table.find_or_insert(ids)
    order = torch.cat([torch.arange(301), torch.randint(0, 301, (5000,))]).to(device_type)
    # All columns of row i are i, so that a mixed row would show.
    rows = torch.arange(5301.0, device=device_type)[:, None].expand(-1, 65).contiguous()
    assert table.insert_or_assign(ids[order], rows).all()
    assert table.size == 301
    found_rows, found = table.find(ids)
    assert found.all()
    assert (found_rows == found_rows[:, :1]).all()
    source = found_rows[:, 0].long()
    assert torch.equal(order[source].cpu(), torch.arange(301))
    if device_type == "cpu":
        last = {id_: at for at, id_ in enumerate(order.tolist())}
        assert source.tolist() == [last[id_] for id_ in range(301)]


def test_an_empty_call(device_type):
    table = make(device_type)
    placed = table.insert_or_assign(distinct_ids(0, device_type), random_rows(table, 0))
    assert placed.shape == (0,)
    assert table.size == 0
