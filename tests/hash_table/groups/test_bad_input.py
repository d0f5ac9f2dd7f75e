"""Calls of a group refuse bad input with one sentence, before anything changes."""

import pytest
import torch

from torchrec_hkv.hash_table import TableGroup, TableSpec

OPERATIONS = {
    "find_rows": [],
    "contains": [],
    "find_missing": [],
    "find_or_insert_rows": ["scores"],
    "find_or_insert_slots": ["scores"],
    "insert_or_assign": ["rows", "scores"],
    "insert_and_evict": ["rows", "scores"],
    "accum_or_assign": ["rows", "accumulate", "scores"],
    "assign": ["rows", "scores"],
    "assign_rows": ["rows"],
    "assign_scores": ["scores"],
    "erase": [],
}


@pytest.fixture
def group(device_type):
    specs = [TableSpec("a", 64, 2), TableSpec("b", 64, 4, eviction="customized")]
    return TableGroup(specs, [0, 1], device=device_type)


def call(group, operation, **bad):
    device = group.device
    arguments = {
        "ids": torch.arange(6, device=device),
        "offsets": torch.tensor([0, 2, 6], device=device),
        "batch_size": 1,
        "rows": torch.ones(6, 4, device=device),
        "accumulate": torch.zeros(6, dtype=torch.bool, device=device),
        "scores": torch.ones(6, dtype=torch.int64, device=device),
    }
    arguments.update(bad)
    names = ["ids", "offsets", "batch_size", *OPERATIONS[operation]]
    return getattr(group, operation)(*(arguments[name] for name in names))


def refuses(group, operation, error, match, **bad):
    call(group, "insert_or_assign")
    before = list(group.export()), group.counters(), group.clock
    with pytest.raises(error, match=match):
        call(group, operation, **bad)
    after = list(group.export()), group.counters(), group.clock
    assert after[1:] == before[1:]
    for part, was in zip(after[0], before[0], strict=True):
        assert torch.equal(part.ids, was.ids)
        assert torch.equal(part.rows, was.rows)
        assert torch.equal(part.scores, was.scores)


def with_argument(name):
    return [operation for operation, names in OPERATIONS.items() if name in names]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ids_and_offsets(group, operation):
    ids, offsets = torch.arange(6, device=group.device), torch.tensor([0, 2, 6])
    offsets = offsets.to(group.device)
    refuses(group, operation, TypeError, "ids must be", ids=ids.float())
    refuses(group, operation, TypeError, "offsets must be of dtype", offsets=offsets.int())
    refuses(group, operation, ValueError, "offsets must be given for a group of 2", offsets=None)
    refuses(group, operation, ValueError, "offsets must have 3 elements", offsets=offsets[:2])
    refuses(group, operation, ValueError, "offsets must have 5 elements", batch_size=2)
    refuses(group, operation, ValueError, "batch_size is -1", batch_size=-1)
    if group.device.type == "cpu":  # checking a GPU's would make the host wait
        bad = torch.tensor([0, 7, 6])
        refuses(group, operation, ValueError, "offsets must not decrease", offsets=bad)
        bad = torch.tensor([0, 2, 5])
        refuses(group, operation, ValueError, "offsets must end with the number", offsets=bad)


@pytest.mark.parametrize("operation", with_argument("rows"))
def test_rows(group, operation):
    rows = torch.ones(6, 4, device=group.device)
    refuses(group, operation, TypeError, "rows must be a tensor of dtype", rows=rows.half())
    refuses(group, operation, ValueError, r"rows must have shape \(6, 4\)", rows=rows[:, :2])
    refuses(group, operation, ValueError, r"rows must have shape \(6, 4\)", rows=rows[:5])


@pytest.mark.parametrize("operation", with_argument("scores"))
def test_scores(group, operation):
    ones = torch.ones(6, dtype=torch.int64, device=group.device)
    refuses(group, operation, ValueError, "scores must be given", scores=None)
    refuses(group, operation, ValueError, r"scores must have shape \(6,\)", scores=ones[:5])
    refuses(group, operation, TypeError, "scores must be a tensor", scores=ones.float())


def test_scores_that_nobody_takes(device_type):
    specs = [TableSpec("a", 64, 2), TableSpec("b", 64, 2, eviction="epoch_lru")]
    group = TableGroup(specs, [0, 1], device=device_type)
    ids = torch.arange(2, device=device_type)
    offsets = torch.tensor([0, 1, 2], device=device_type)
    with pytest.raises(ValueError, match="eviction 'lru' and 'epoch_lru', which make their own"):
        group.assign_scores(ids, offsets, 1, ids)
    assert group.clock == 0


def test_beliefs(group):
    flags = torch.zeros(6, dtype=torch.bool, device=group.device)
    refuses(group, "accum_or_assign", TypeError, "accumulate must be", accumulate=flags.int())
    refuses(group, "accum_or_assign", ValueError, "accumulate must have", accumulate=flags[:5])


def test_rows_by_feature(group):
    rows = [torch.ones(2, 2, device=group.device), torch.ones(4, 4, device=group.device)]
    with pytest.raises(ValueError, match="rows must be 2 tensors, one for each feature, but are 1"):
        group.join_rows(rows[:1])
    with pytest.raises(ValueError, match=r"rows\[1\] must have 4 columns, those of table 'b'"):
        group.join_rows([rows[0], rows[1][:, :3]])
    offsets = torch.tensor([0, 2, 5], device=group.device)
    with pytest.raises(
        ValueError, match="must end with the number of rows, 6, but there are 3 that end with"
    ):
        group.split_rows(group.join_rows(rows), offsets, 1)


def test_slots(group):
    op = torch.ops.torchrec_hkv.erase_slots
    group.reserve(0, 0)
    if group.device.type == "cuda":
        return  # a check would make the host wait
    end = group.num_slots
    with pytest.raises(ValueError, match=f"slots must be from -1 to {end - 1}, but go from -2"):
        op(group.counter_tensor, group.handle, torch.tensor([-2, end]))
    grown = TableGroup(
        [TableSpec("a", 4096, 2, initial_capacity=64), TableSpec("b", 64, 2)], [0, 1]
    )
    past = grown.present_slots(0)
    with pytest.raises(ValueError, match=f"slot {past} is of a table that has grown to"):
        op(grown.counter_tensor, grown.handle, torch.tensor([0, past]))
