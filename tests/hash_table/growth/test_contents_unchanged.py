"""Growth changes slots and nothing else: rows, states, scores, last steps and counters stay."""

import pytest
import torch

from tests.support.growing_tables import check_buckets
from tests.support.saved_tables import entries, filled
from tests.support.table_model import POLICIES


def grow_and_compare(table) -> None:
    before, counters = entries(table), table.counters()
    slots, clock = table.num_slots, table._group.clock
    while table.num_slots < table.capacity:
        table.reserve(min(table.capacity, table.num_slots))
        assert table.num_slots == 2 * slots
        slots = table.num_slots
        assert entries(table) == before
        assert table.size == len(before)
        ids = torch.tensor(list(before), dtype=torch.int64, device=table.device)
        found = table.find_slots(ids).tolist()
        assert len(set(found)) == len(before)
        assert -1 not in found
        check_buckets(table, dict(zip(before, found, strict=True)))
    assert table.counters() == counters
    assert table._group.clock == clock


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_and_dtypes(device_type, policy, dtype):
    table = filled(
        device_type, 200, 3000, eviction=policy, dtype=dtype, state_dim=2, initial_capacity=230
    )
    grow_and_compare(table)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 129])
@pytest.mark.parametrize("state_dim", [0, 1, 5])
def test_widths(device_type, dim, state_dim):
    grow_and_compare(filled(device_type, 300, 1400, dim=dim, state_dim=state_dim,
                            dtype=torch.float16, initial_capacity=350))  # fmt: skip


@pytest.mark.parametrize("buckets", [1, 2, 3, 5, 7, 8, 11])
@pytest.mark.parametrize("bucket_slots", [61, 64])
def test_numbers_of_buckets(device_type, buckets, bucket_slots):
    initial = buckets * bucket_slots
    table = filled(device_type, initial * 7 // 8, 8 * initial, initial_capacity=initial)
    assert (table.num_slots, table.capacity) == (initial, 8 * initial)
    grow_and_compare(table)


def test_an_empty_table(device_type):
    table = filled(device_type, 0, 2000, initial_capacity=100)
    grow_and_compare(table)
    assert table.size == 0
