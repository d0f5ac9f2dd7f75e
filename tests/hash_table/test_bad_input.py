"""Bad input is refused with one sentence before anything changes."""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rate
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform


@pytest.fixture
def group():
    return TableGroup([TableSpec("t", 100, 4, initializer=Uniform(-1, 1))], [0, 0], SGD())


IDS, OFFSETS = torch.arange(4), torch.tensor([0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("ids", "offsets", "batch_size", "error", "match"),
    [
        (IDS.float(), OFFSETS, 2, TypeError, r"ids must be a tensor of integers .* torch\.float32"),
        (IDS.bool(), OFFSETS, 2, TypeError, r"ids must be a tensor of integers .* torch\.bool"),
        (IDS.view(2, 2), OFFSETS, 2, ValueError, r"ids must have one dimension, but has shape"),
        (IDS, OFFSETS.int(), 2, TypeError, r"offsets must be of dtype Long"),
        (IDS, OFFSETS[:4], 2, ValueError, r"offsets must have 5 elements, but has 4"),
        (IDS, OFFSETS, -1, ValueError, r"batch_size is -1, but must not be negative"),
        (IDS, OFFSETS + 1, 2, ValueError, r"offsets must begin with 0, but begin with 1"),
        (IDS, OFFSETS * 2, 2, ValueError, r"offsets must end with the number of ids, 4, but end"),
        (
            IDS,
            torch.tensor([0, 3, 2, 3, 4]),
            2,
            ValueError,
            r"offsets must not decrease, but go from 3 to 2 at bag 1",
        ),
    ],
)
def test_batches(group, ids, offsets, batch_size, error, match):
    pin = group.pin()
    for call in (
        lambda: group.find(ids, offsets, batch_size),
        lambda: group.find_or_insert(ids, offsets, batch_size, pin),
    ):
        with pytest.raises(error, match=match):
            call()
    assert group.counters()[0] == {
        **dict.fromkeys(["lookups", "hits", "inserted", "evicted", "refused"], 0),
        **dict.fromkeys(["unadmitted", "expired", "fetched", "written_back", "size"], 0),
        **dict.fromkeys(["host_hits", "returned"], 0),
        "capacity": 100,
    }


@pytest.mark.parametrize("number", [-1, 0, 3, 2**40])
def test_a_pin_that_is_not_held(group, number):
    ops, counters = torch.ops.torchrec_hkv, group.counter_tensor
    anchor = torch.empty(0, requires_grad=True)
    slots = insert(group, Bags(IDS, OFFSETS, 2))
    lr = torch.tensor(0.1)
    match = rf"pin is {number}, but this group holds no such pin"
    with pytest.raises(ValueError, match=match):
        ops.find_or_insert(counters, group.handle, IDS, OFFSETS, 2, number)
    with pytest.raises(ValueError, match=match):
        ops.pooled_lookup(anchor, group.handle, IDS, OFFSETS, None, slots, 2, False, number, lr)
    assert group.clock == 1


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        (torch.rand(3), ValueError, r"weights must have 4 elements, but has 3"),
        (torch.rand(4).double(), TypeError, r"weights must be of dtype Float, but is of dtype Dou"),
    ],
)
def test_weights(group, weights, error, match):
    with pytest.raises(error, match=match):
        lookup(group, Bags(IDS, OFFSETS, 2), weights)


def test_a_gradient_of_another_shape(group):
    slots = insert(group, Bags(IDS, OFFSETS, 2))
    counters = group._group.counters
    update = torch.ops.torchrec_hkv.update_rows
    args = (IDS, OFFSETS, None, slots, 2, False, rate(0.1, group))
    with pytest.raises(ValueError, match=r"grad must have shape \[2, 8\], but has \[2, 7\]"):
        update(counters, group.handle, torch.rand(2, 7), *args)


def test_grouped_positions_on_a_cpu(group):
    """On a CPU updates group positions themselves."""
    slots = insert(group, Bags(IDS, OFFSETS, 2))
    grouped, ways = torch.empty(100, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    args = (torch.rand(2, 8), IDS, OFFSETS, None, slots, 2, False, rate(0.1, group), 1, None)
    before = vars(group.export_table(0))
    with pytest.raises(ValueError, match=r"grouped is for tables on a GPU, but these are on cpu"):
        torch.ops.torchrec_hkv.update_rows(group.counter_tensor, group.handle, *args, grouped, ways)
    for name, value in vars(group.export_table(0)).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("learning_rate", "error", "match"),
    [
        (torch.tensor([0.1]), ValueError, r"learning_rate must have no dimensions, but has shape"),
        (torch.tensor(0.1).double(), TypeError, r"learning_rate must be of dtype Float, but is of"),
    ],
)
def test_learning_rates(group, learning_rate, error, match):
    slots = insert(group, Bags(IDS, OFFSETS, 2))
    before = vars(group.export_table(0))
    anchor = torch.empty(0, requires_grad=True)
    args = (IDS, OFFSETS, None, slots, 2, False)
    for call in (
        lambda: group.pooled_lookup(anchor, *args, group.pin(), learning_rate),
        lambda: torch.ops.torchrec_hkv.update_rows(
            group.counter_tensor, group.handle, torch.rand(2, 8), *args, learning_rate
        ),
    ):
        with pytest.raises(error, match=match):
            call()
    for name, value in vars(group.export_table(0)).items():
        assert torch.equal(value, before[name]), name


def test_training_tables_without_an_optimizer():
    group = TableGroup([TableSpec("t", 100, 4)], [0])
    slots = insert(group, Bags.flat(IDS))
    with pytest.raises(ValueError, match=r"tables of this group have no optimizer"):
        torch.ops.torchrec_hkv.update_rows(
            group._group.counters,
            group.handle,
            torch.rand(1, 4),
            IDS,
            torch.tensor([0, 4]),
            None,
            slots,
            1,
            False,
            rate(0.1, group),
        )


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (TableSpec("t", 0, 4), r"capacity is 0, but must be at least 1"),
        (TableSpec("t", 10, 0), r"table 't': dim is 0, but must be from 1 to 2048"),
        (TableSpec("t", 10, 2049), r"table 't': dim is 2049, but must be from 1 to 2048"),
        (TableSpec("t", 10, 4, hbm_bytes=-1), r"table 't': hbm_bytes is -1, but 10 rows need at l"),
        (TableSpec("t", 10, 4, "fifo"), r"table 't': eviction is 'fifo', but must be one of 'lru'"),
        (TableSpec(3, 10, 4), r"A table's name is 3, but must be a string"),
        (TableSpec("t", "10", 4), r"table 't': capacity is '10', but must be an integer"),
        (TableSpec("t", 10, 4.0), r"table 't': dim is 4.0, but must be an integer"),
        (TableSpec("t", 10, 4, seed=None), r"table 't': seed is None, but must be an integer"),
        (TableSpec("t", 10, 4, hbm_bytes="1"), r"hbm_bytes is '1', but must be an integer or None"),
        (TableSpec("t", 10, 4, initial_capacity=True), r"initial_capacity is True, but must be"),
        (TableSpec("t", 10, 4, initializer=(0, 1)), r"initializer is \(0, 1\), but must be a Uni"),
    ],
)
def test_impossible_tables(spec, match):
    with pytest.raises(ValueError, match=match):
        TableGroup([spec], [0])


def test_impossible_groups():
    spec = TableSpec("t", 10, 4)
    with pytest.raises(ValueError, match=r"a feature names table 1, but the group has 1"):
        TableGroup([spec], [1])
    with pytest.raises(ValueError, match=r"at least one table"):
        TableGroup([], [])
    with pytest.raises(ValueError, match=r"optimizer is 'adam', but must be None or one of"):
        TableGroup([spec], [0], "adam")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        TableGroup([TableSpec("t", 10, 4)], [0], device="cuda:0")


@needs_gpu
def test_ids_on_another_device():
    group = TableGroup([TableSpec("t", 10, 4)], [0], device="cuda")
    with pytest.raises(ValueError, match=r"ids must be on cuda:0, but is on cpu"):
        insert(group, Bags.flat(random_ids(3)))
