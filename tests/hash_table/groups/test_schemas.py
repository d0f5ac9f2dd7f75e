"""opcheck accepts the schemas and fakes of the ops for groups of several tables."""

import pytest
import torch

from torchrec_hkv.hash_table import TableGroup, TableSpec

ops = torch.ops.torchrec_hkv


@pytest.fixture
def group(device_type):
    specs = [TableSpec("a", 64, 2, eviction="lfu"), TableSpec("b", 64, 4, eviction="lfu")]
    group = TableGroup(specs, [0, 1], device=device_type, state_dim=3)
    device = group.device
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 2, 6], device=device)
    zeros = torch.zeros_like(ids)  # opcheck runs an op several times
    group.insert_or_assign(ids, offsets, 1, torch.ones(6, 4, device=device), zeros)
    return group


def test_insert(group):
    device = group.device
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 2, 6], device=device)
    begin = (group.counter_tensor, group.handle)
    initialize = (torch.zeros_like(ids), None, None, True, False, False, offsets, 1)
    torch.library.opcheck(ops.insert, (*begin, ids, *initialize))


def test_insert_and_give_back(group):
    """One id is refused, so outputs are not empty, and equal however often the op runs."""
    device = group.device
    full, offsets = torch.arange(64, device=device), torch.tensor([0, 0, 64], device=device)
    group.insert_or_assign(
        full, offsets, 1, torch.ones(64, 4, device=device), torch.full_like(full, 5)
    )
    one, offsets = torch.tensor([99], device=device), torch.tensor([0, 0, 1], device=device)
    row, score = torch.ones(1, 4, device=device), torch.zeros_like(one)
    begin = (group.counter_tensor, group.handle, one, score, row)
    torch.library.opcheck(ops.insert, (*begin, None, False, True, True, offsets, 1))


def test_ops_on_slots(group):
    device = group.device
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 2, 6], device=device)
    slots, zeros = group.find(ids, offsets, 1), torch.zeros_like(ids)
    rows = torch.ones(6, 4, device=device)
    counters, handle = group.counter_tensor, group.handle
    torch.library.opcheck(ops.gather_rows, (handle, ids, slots, offsets, 1))
    torch.library.opcheck(ops.write_rows, (counters, handle, slots, rows, False))
    torch.library.opcheck(ops.touch, (counters, handle, ids, zeros, offsets, 1))
    torch.library.opcheck(ops.export_slots, (handle, slots))
    torch.library.opcheck(ops.select_slots, (counters, handle, [0, 1], 0, -1, 2**62))
    torch.library.opcheck(ops.select_slots, (counters, handle, [1], 0, -1, 2**62))
    torch.library.opcheck(ops.erase_slots, (counters, handle, slots))
