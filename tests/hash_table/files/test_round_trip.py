"""A saved table loads bit for bit: ids, slots, rows, scores, last steps, states."""

import pytest
import torch

from tests.support.saved_tables import assert_same, filled, like, snapshot
from tests.support.table_model import POLICIES, TAKES_SCORES
from tests.support.tables import distinct_ids

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_dtype(device_type, tmp_path, policy, dtype):
    table = filled(device_type, dim=5, eviction=policy, dtype=dtype, state_dim=3)
    table.save(tmp_path)
    loaded = filled(device_type, dim=5, eviction=policy, dtype=dtype, state_dim=3)
    assert loaded.load(tmp_path) == 0
    assert_same(snapshot(table), snapshot(loaded))


@pytest.mark.parametrize("policy", POLICIES)
def test_both_go_on_alike(device_type, tmp_path, policy):
    """The saved and the loaded table evict the same ids afterwards."""
    table = filled(device_type, 2000, eviction=policy)
    table.save(tmp_path)
    loaded = like(table)
    loaded.load(tmp_path)
    # One id at a time: on a GPU the order within a call is undefined.
    for part in distinct_ids(100, device_type).split(1):
        table.epoch += 1
        loaded.epoch += 1
        scores = torch.randint(0, 50, (1,)).to(device_type) if policy in TAKES_SCORES else None
        table.find_or_insert(part, scores)
        loaded.find_or_insert(part, scores)
    assert_same(snapshot(table), snapshot(loaded))


def test_saving_changes_nothing(device_type, tmp_path):
    table = filled(device_type, eviction="lfu", state_dim=1)
    before, counters = snapshot(table), table.counters()
    table.save(tmp_path)
    assert_same(before, snapshot(table))
    assert table.counters() == counters


def test_every_legal_id(device_type, tmp_path):
    table = filled(device_type, 0)
    ids = torch.tensor([0, -1, 1, -(2**63), 2**63 - 1], device=device_type)
    rows, _ = table.find_or_insert(ids)
    table.save(tmp_path)
    loaded = like(table)
    loaded.load(tmp_path)
    again, found = loaded.find(ids)
    assert found.all()
    assert torch.equal(again, rows)
