"""Impossible initial capacities."""

import pytest
import torch

from tests.support.tables import make
from torchrec_hkv.hash_table import TableGroup, TableSpec, table_memory


@pytest.mark.parametrize("initial", [0, -1, 1001, 2**40])
def test_refused(device_type, initial):
    with pytest.raises(ValueError, match=f"initial_capacity is {initial}, .* 1000"):
        make(device_type, 1000, initial_capacity=initial)
    with pytest.raises(ValueError, match=f"initial_capacity is {initial}, .* 1000"):
        table_memory(1000, 4, 0, "lru", initial_capacity=initial)
    specs = [TableSpec("good", 10, 4), TableSpec("bad", 1000, 4, initial_capacity=initial)]
    with pytest.raises(ValueError, match=f"initial_capacity is {initial}, .* 1000"):
        TableGroup(specs, [0, 1], device=device_type)


def test_stale_slots_of_a_smaller_table(device_type):
    """A CPU refuses slots beyond the present ones."""
    if device_type == "cuda":
        pytest.skip("slots are not looked at on a GPU")
    table = make(device_type, 1000, initial_capacity=100)
    with pytest.raises(ValueError, match=f"from -1 to {table.num_slots - 1}, "):
        table.group._erase_slots(torch.tensor([table.num_slots]))
