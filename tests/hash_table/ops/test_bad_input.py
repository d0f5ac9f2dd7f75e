"""Bad input is refused with one sentence, and nothing changes."""

import numpy as np
import pytest
import torch

from tests.support.gpu import needs_gpu
from tests.support.table_model import POLICIES, TAKES_SCORES
from tests.support.tables import contents, make, random_rows
from torchrec_hkv.hash_table import HashTable

N, DIM = 6, 4


@pytest.fixture(params=["lru", "lfu", "customized"])
def table(request, device_type):
    table = make(device_type, 64, DIM, eviction=request.param)
    rows = random_rows(table, 3)
    table.insert_or_assign(torch.arange(3, device=device_type), rows, scores_for(table, 3))
    return table


def scores_for(table: HashTable, n: int = N) -> torch.Tensor | None:
    if table.eviction not in TAKES_SCORES:
        return None
    return torch.ones(n, dtype=torch.int64, device=table.device)


def good(table: HashTable) -> dict[str, torch.Tensor]:
    """Valid arguments by name."""
    return {
        "ids": torch.arange(N, device=table.device),
        "rows": random_rows(table, N),
        "accumulate": torch.arange(N, device=table.device) < 3,
        "scores": scores_for(table),
    }


OPERATIONS = {
    "find": ["ids"],
    "find_slots": ["ids"],
    "find_missing": ["ids"],
    "contains": ["ids"],
    "find_or_insert": ["ids", "scores"],
    "find_or_insert_slots": ["ids", "scores"],
    "insert_or_assign": ["ids", "rows", "scores"],
    "insert_and_evict": ["ids", "rows", "scores"],
    "accum_or_assign": ["ids", "rows", "accumulate", "scores"],
    "assign": ["ids", "rows", "scores"],
    "assign_rows": ["ids", "rows"],
    "assign_scores": ["ids", "scores"],
    "erase": ["ids"],
}


def with_argument(name: str) -> list[str]:
    return [operation for operation, names in OPERATIONS.items() if name in names]


def refuses(table: HashTable, operation: str, error: type, match: str, **bad: object) -> None:
    """The operation with one bad argument raises one sentence and changes nothing."""
    before, counters = contents(table), table.counters()
    arguments = {name: {**good(table), **bad}[name] for name in OPERATIONS[operation]}
    with pytest.raises(error, match=match) as info:
        getattr(table, operation)(**arguments)
    message = str(info.value).splitlines()[0]
    assert message.endswith(".")
    assert contents(table) == before
    assert table.counters() == counters


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ids(table, operation):
    ids = good(table)["ids"]
    refuses(table, operation, TypeError, "ids must be", ids=ids.float())
    refuses(table, operation, TypeError, "ids must be", ids=ids.bool())
    refuses(table, operation, ValueError, "ids must", ids=ids.view(2, 3))
    one = {name: None if tensor is None else tensor[:1] for name, tensor in good(table).items()}
    refuses(table, operation, ValueError, "ids must", **{**one, "ids": ids[0]})


@needs_gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ids_on_another_device(operation, device):
    table = make(device, 64, DIM)
    other = "cuda" if device == "cpu" else "cpu"
    refuses(table, operation, ValueError, "must be on", ids=good(table)["ids"].to(other))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_that_are_not_dense(table, operation):
    arguments = good(table)
    for name in OPERATIONS[operation]:
        tensor = arguments[name]
        if tensor is None:
            continue
        for bad in (tensor.to_sparse(), torch.nested.nested_tensor([tensor[:2], tensor[:3]])):
            refuses(table, operation, TypeError, f"{name} must be a dense", **{name: bad})


@pytest.mark.parametrize("operation", with_argument("rows"))
def test_rows(table, operation):
    rows = good(table)["rows"]
    for bad in (rows.double(), rows.half(), rows.long()):
        refuses(table, operation, TypeError, "rows must be", rows=bad)
    for bad in (rows[:5], rows[:, :3], rows.flatten(), rows[None], torch.cat([rows, rows])):
        refuses(table, operation, ValueError, "rows must have shape", rows=bad)
    elsewhere = rows.to("meta")
    refuses(table, operation, ValueError, "rows must be on", rows=elsewhere)


def test_rows_of_another_16_bit_type(device_type):
    table = make(device_type, 64, DIM, dtype=torch.float16)
    rows = good(table)["rows"]
    for bad in (rows.float(), rows.bfloat16()):
        refuses(table, "insert_or_assign", TypeError, "rows must be", rows=bad)


@pytest.mark.parametrize("operation", with_argument("scores"))
@pytest.mark.parametrize("policy", TAKES_SCORES)
def test_scores(device_type, operation, policy):
    table = make(device_type, 64, DIM, eviction=policy)
    table.insert_or_assign(
        torch.arange(3, device=device_type), random_rows(table, 3), scores_for(table, 3)
    )
    scores = good(table)["scores"]
    for bad in (scores.float(), scores.int()):
        refuses(table, operation, TypeError, "scores must be", scores=bad)
    for bad in (scores[:5], scores.repeat(2), scores[:, None], scores[0]):
        refuses(table, operation, ValueError, "scores must have shape", scores=bad)
    refuses(table, operation, ValueError, "scores must be on", scores=scores.to("meta"))


@pytest.mark.parametrize("operation", with_argument("scores"))
@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in TAKES_SCORES])
def test_scores_where_the_policy_makes_them(device_type, operation, policy):
    table = make(device_type, 64, DIM, eviction=policy)
    scores = torch.ones(N, dtype=torch.int64, device=device_type)
    refuses(table, operation, ValueError, "scores must not be given", scores=scores)


@pytest.mark.parametrize("operation", with_argument("scores"))
def test_no_scores_where_the_policy_needs_them(device_type, operation):
    table = make(device_type, 64, DIM, eviction="customized")
    refuses(table, operation, ValueError, "scores must be given", scores=None)


def test_accumulate(table):
    flags = good(table)["accumulate"]
    for bad in (flags.long(), flags.float()):
        refuses(table, "accum_or_assign", TypeError, "accumulate must be", accumulate=bad)
    for bad in (flags[:5], flags.repeat(2), flags[:, None]):
        refuses(table, "accum_or_assign", ValueError, "accumulate must have", accumulate=bad)
    bad = flags.to("meta")
    refuses(table, "accum_or_assign", ValueError, "accumulate must be on", accumulate=bad)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_export_batches(table, batch_size):
    with pytest.raises(ValueError, match=r"batch_size is .*, but must be at least 1\."):
        list(table.export(batch_size))
    with pytest.raises(ValueError, match=r"batch_size is .*, but must be at least 1\."):
        list(table.export_if(older_than=0, batch_size=batch_size))


@pytest.mark.parametrize("name", ["score_below", "score_at_least", "older_than"])
def test_conditions(table, name):
    before = contents(table)
    bound = -1
    if name != "older_than" and table.eviction == "customized":  # policies with signed scores
        bound = -(2**63) - 1
    with pytest.raises(ValueError, match=rf"{name} is {bound}, but must"):
        table.erase_if(**{name: bound})
    with pytest.raises(ValueError, match=rf"{name} is {bound}, but must"):
        list(table.export_if(**{name: bound}))
    assert contents(table) == before


@pytest.mark.parametrize("epoch", [-1, 2**32])
@pytest.mark.parametrize("policy", ["epoch_lru", "epoch_lfu"])
def test_epochs(device_type, policy, epoch):
    table = make(device_type, 64, DIM, eviction=policy)
    table.find_or_insert(torch.arange(3, device=device_type))
    with pytest.raises(ValueError, match=rf"epoch is {epoch}, but must be from 0 to 2\^32 - 1\."):
        table.epoch = epoch
    assert table.epoch == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": 0}, r"capacity is 0, but must be at least 1"),
        ({"capacity": -5}, r"capacity is -5, but must be at least 1"),
        ({"dim": 0}, r"dim is 0, but must be from 1 to 2048"),
        ({"dim": 2049}, r"dim is 2049, but must be from 1 to 2048"),
        ({"eviction": "fifo"}, r"eviction is 'fifo', but must be"),
        ({"dtype": torch.float64}, r"dtype is .*float64, but must be"),
        ({"dtype": torch.int32}, r"dtype is .*int32, but must be"),
        ({"state_dim": -1}, r"state_dim is -1, but must"),
        ({"initializer": 0.5}, r"initializer is 0.5, but must be a Uniform, Normal, Truncated"),
        ({"seed": 2**63}, r"seed is 9223372036854775808, but must be"),
    ],
)
def test_impossible_tables(device_type, options, match):
    with pytest.raises(ValueError, match=match):
        make(device_type, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        make("cuda:0")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ids", [[1, 2], None, np.arange(2)], ids=["list", "none", "array"])
def test_ids_that_are_no_tensor(table, operation, ids):
    refuses(table, operation, TypeError, "ids must be a tensor of integers", ids=ids)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ids_without_memory(table, operation):
    refuses(table, operation, ValueError, "(ids|rows) must", ids=torch.arange(N, device="meta"))


@pytest.mark.parametrize("number", [1.5, "1", True])
def test_numbers_that_are_no_integers(table, number):
    calls = {
        "score_below": lambda: table.erase_if(score_below=number),
        "score_at_least": lambda: list(table.export_if(score_at_least=number)),
        "older_than": lambda: table.erase_if(older_than=number),
        "batch_size": lambda: list(table.export(number)),
        "rows": lambda: table.reserve(number),
        "epoch": lambda: setattr(table, "epoch", number),
        "table 'table': state_dim": lambda: HashTable(4, 100, state_dim=number),
    }
    for what, call in calls.items():
        with pytest.raises(ValueError, match=f"{what} is {number!r}, but must be an integer"):
            call()
