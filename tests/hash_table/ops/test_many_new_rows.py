"""A call makes thousands of new rows, which replace other ids: every column is correct.

A CPU makes few rows in place, and many in a buffer that is written in whole cache lines.
"""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup
from tests.support.initial_value import initial_value
from torchrec_hkv.hash_table import AdamW, TableGroup, TableSpec, Uniform, initial_rows

CAPACITY = 640
INITIALIZER = Uniform(-0.3, 0.1)
#: Rows of one line, of several, of all that the buffer holds, and of a fraction of lines.
DIMS = [16, 20, 64, 97, 2048]


def _batch(ids: torch.Tensor, features: int) -> Bags:
    """The same ids for all features, one a bag."""
    n = len(ids) * features
    return Bags(ids.repeat(features), torch.arange(n + 1), len(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_states_of_a_large_call(device_type, dtype):
    specs = [
        TableSpec(f"t{dim}", CAPACITY, dim, dtype=dtype, initializer=INITIALIZER) for dim in DIMS
    ]
    group = TableGroup(specs, list(range(len(DIMS))), AdamW(), device=device_type)
    old = _batch(torch.arange(CAPACITY // 2), len(DIMS)).to(device_type)
    out = lookup(group, old)
    out.backward(torch.randn_like(out))  # evicted rows are not zero
    new = torch.randperm(3 * CAPACITY)[: 2 * CAPACITY] + 10_000
    slots = insert(group, _batch(new, len(DIMS)).to(device_type))
    assert (slots >= 0).any()
    for table, dim in enumerate(DIMS):
        state = group.export_table(table)
        is_new = state.occupied & (state.ids >= 10_000)
        assert is_new.sum() > 0.9 * CAPACITY
        expected = initial_rows(state.ids[is_new], dim, table=f"t{dim}", initializer=INITIALIZER)
        assert torch.equal(state.rows[is_new], expected.to(dtype))
        assert not state.states[is_new].any()


@pytest.mark.parametrize("dim", [31, 32, 33, 47, 48, 63, 64, 100])
def test_wide_rows_follow_the_documented_formula(device_type, dim):
    """A CPU makes columns 32, 16 and one at a time."""
    ids = torch.tensor([-(2**63), -1, 0, 5, 2**63 - 1])
    rows = initial_rows(ids.to(device_type), dim, table="user", seed=3, initializer=INITIALIZER)
    expected = [
        [initial_value(i, c, "user", 3, INITIALIZER) for c in range(dim)] for i in ids.tolist()
    ]
    assert torch.equal(rows.cpu(), torch.tensor(expected))
