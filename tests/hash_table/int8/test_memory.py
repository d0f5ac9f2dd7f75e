"""An int8 row takes one byte a column and four for its scale; planned and actual bytes are
equal."""

import pytest
import torch

from torchrec_hkv.hash_table import HashTable, table_memory


@pytest.mark.parametrize("dim", [1, 4, 30, 128, 260])
@pytest.mark.parametrize("state_dim", [0, 1, 16])
def test_planned_bytes_are_taken(device_type, dim, state_dim):
    capacity = 100_000
    memory = table_memory(capacity, dim, state_dim, "lru", 1)
    assert memory.row_bytes - memory.state_bytes == 4 + (dim + 3) // 4 * 4
    table = HashTable(dim, capacity, device=device_type, dtype=torch.int8, state_dim=state_dim)
    taken = table.group.hbm_bytes(0) + table.group.host_bytes(0)
    assert taken == pytest.approx(memory.bytes, rel=0.05)


def test_less_than_a_third_of_float32():
    """Holds for rows of 128 columns, with and without the index of ids."""
    narrow, wide = (table_memory(1_000_000, 128, 0, "lru", size) for size in (1, 4))
    assert narrow.row_bytes / wide.row_bytes <= 0.26
    assert narrow.bytes / wide.bytes <= 0.30
