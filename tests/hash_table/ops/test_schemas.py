"""opcheck accepts the schemas and fakes of the ops below HashTable."""

import pytest
import torch

from tests.support.tables import distinct_ids, make, random_rows, scores_tensor
from torchrec_hkv.hash_table import MinFrequency, Probability

ops = torch.ops.torchrec_hkv


@pytest.fixture
def table(device_type):
    return make(device_type, eviction="lfu", state_dim=2)


def test_insert(table, device_type):
    group, ids = table._group, distinct_ids(5, device_type)
    args = (group.counter_tensor, group.handle, ids, None, None, None, True, False, False)
    torch.library.opcheck(ops.insert, args)


def test_insert_and_give_back(table, device_type):
    """One id is refused, so outputs are not empty, and equal however often the op runs."""
    group, ids = table._group, distinct_ids(65, device_type)
    table.find_or_insert(ids[:64], scores_tensor([5] * 64, device_type))
    one, row, score = ids[64:], random_rows(table, 1), scores_tensor([0], device_type)
    args = (group.counter_tensor, group.handle, one, score, row, None, False, True, True)
    torch.library.opcheck(ops.insert, args)


def test_ops_on_slots(table, device_type):
    group, ids = table._group, distinct_ids(5, device_type)
    slots, _ = table.find_or_insert_slots(ids)
    rows = random_rows(table, 5)
    scores = scores_tensor([0] * 5, device_type)  # opcheck runs an op several times
    counters, handle = group.counter_tensor, group.handle
    torch.library.opcheck(ops.gather_rows, (handle, ids, slots))
    torch.library.opcheck(ops.write_rows, (counters, handle, slots, rows, False))
    torch.library.opcheck(ops.touch, (counters, handle, ids, scores))
    torch.library.opcheck(ops.export_slots, (handle, slots))
    torch.library.opcheck(ops.erase_slots, (counters, handle, slots))


@pytest.mark.parametrize(
    "admission", [MinFrequency(3, entries=64, halve_every=1), MinFrequency(3, sketch_bytes=64)]
)
def test_what_happens_as_calls_go_by(device_type, admission):
    table = make(device_type, eviction="lfu", admission=admission, expire_after=1)
    group, ids = table._group, distinct_ids(5, device_type)
    table.find_or_insert(ids)
    counters, handle = group.counter_tensor, group.handle
    torch.library.opcheck(ops.touch, (counters, handle, ids, None))
    torch.library.opcheck(ops.expire, (counters, handle))


def test_an_insertion_that_admits_nothing(device_type):
    """Returns rows of the refused id, equal however often the op runs."""
    table = make(device_type, eviction="lfu", admission=Probability(1e-12))
    group, ids = table._group, distinct_ids(1, device_type)
    rows = random_rows(table, 1)
    args = (group.counter_tensor, group.handle, ids, None, rows, None, False, True, True)
    torch.library.opcheck(ops.insert, args)
