"""opcheck accepts the schemas and fakes of the ops for saving and loading."""

import pytest
import torch

from tests.support.saved_tables import filled
from tests.support.tables import distinct_ids, random_rows

ops = torch.ops.torchrec_hkv


@pytest.fixture(params=["lru", "customized"])
def table(request, device_type):
    return filled(device_type, 400, 64, eviction=request.param, state_dim=2)


def given(table, n=30):
    """Entries of lowest rank, which the full table refuses each time."""
    device = table.device.type
    steps = torch.zeros(n, dtype=torch.int32, device=device)
    scores = torch.zeros(n if table.eviction != "lru" else 0, dtype=torch.int64, device=device)
    states = torch.randn(n, 2, device=device)
    return distinct_ids(n, device), random_rows(table, n), steps, scores, states


def place(table):
    return table._group.counter_tensor, table._group.handle, 0


def test_slot_owners(table):
    torch.library.opcheck(ops.slot_owners, (*place(table), 3, 50))


def test_read_slots(table):
    slots = torch.tensor([5, 10, 63, 5], device=table.device)
    torch.library.opcheck(ops.read_slots, (table._group.handle, 0, slots))


def test_restore_slots(table):
    slots = torch.full((30,), -1, device=table.device)
    torch.library.opcheck(ops.restore_slots, (*place(table), slots, *given(table)))


def test_overwrite_slots(table):
    group = table._group
    slots = group.select_slots(0)[:20]
    ids, rows, steps, scores, states = ops.read_slots(group.handle, 0, slots)
    ids = torch.cat([ids[:10], ids[10:] ^ 1])  # the last ten ids differ from those in the slots
    other = rows.neg(), steps + 1, scores + 1, states.neg()
    torch.library.opcheck(ops.overwrite_slots, (*place(table), slots, ids, *other))
    now = ops.read_slots(group.handle, 0, slots)
    for kept, given, found in zip((rows, steps, scores, states), other, now[1:], strict=True):
        expected = torch.cat([given[:10], kept[10:]]) if kept.numel() else kept
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_restore_entries(table):
    # The op leaves outputs for displaced entries unwritten; there are none here.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (*place(table), *given(table))
    torch.library.opcheck(ops.restore_entries, args, test_utils=checks)
    assert ops.restore_entries(*args)[-1].tolist() == [0, 30]


def test_find_misplaced():
    args = (distinct_ids(9, "cpu"), torch.arange(9), 3, 64, 0, 1 << 16)
    torch.library.opcheck(ops.find_misplaced, args)


def test_ops_that_return_numbers():
    """These ops have no fakes; their schemas declare what they change."""
    checks = ("test_schema", "test_autograd_registration")
    table = filled("cpu", 400, 64, state_dim=2)
    slots = table._group.select_slots(0)[:9].sort().values
    entries = ops.read_slots(table._group.handle, 0, slots)
    # The table already has these entries, so no run changes it.
    batches = [[tensor] for tensor in (slots, *entries)]
    torch.library.opcheck(ops.restore_batches, (*place(table), *batches), test_utils=checks)
    torch.library.opcheck(ops.find_repeated, place(table), test_utils=checks)
    args = (entries[0], slots, 1, 64, 0, 1 << 16)
    torch.library.opcheck(ops.are_placed, args, test_utils=checks)
    args = (torch.zeros(17, dtype=torch.int64), 0, entries[0], 0, 0)
    torch.library.opcheck(ops.add_ids, args, test_utils=checks)


def test_slots_out_of_range(table):
    with pytest.raises(ValueError, match="slots from 60 to 65 were asked for"):
        ops.slot_owners(*place(table), 60, 5)


@pytest.mark.parametrize("index", range(5))
def test_bad_entries(table, index):
    before = table.size
    args = list(given(table))
    args[index] = args[index].double()
    with pytest.raises(TypeError, match="must be of dtype"):
        ops.restore_entries(*place(table), *args)
    args = list(given(table))
    if args[index].numel():
        args[index] = args[index][:-1]
        with pytest.raises(ValueError, match="must have shape"):
            ops.restore_entries(*place(table), *args)
    assert table.size == before
