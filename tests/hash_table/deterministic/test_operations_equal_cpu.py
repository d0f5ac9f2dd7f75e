"""Operations of a deterministic HashTable on a GPU equal those on a CPU, bit for bit.

Ids repeat within calls, with other rows and scores.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.table_states import assert_same_states
from torchrec_hkv.hash_table import AgedLFU, HashTable, MinFrequency, Uniform
from torchrec_hkv.hash_table.stored_rows import number_dtype

pytestmark = NEEDS_GPU
POLICIES = ["lru", "lfu", AgedLFU(0.5), "adaptive", "epoch_lru", "epoch_lfu", "customized"]


def make(policy, dtype, **options):
    """The same table on both devices."""
    return [
        HashTable(
            6,
            300,
            device=device,
            dtype=dtype,
            eviction=policy,
            state_dim=2,
            initializer=Uniform(-1, 1),
            deterministic=True,
            **options,
        )
        for device in ("cuda", "cpu")
    ]


def batches(policy, dtype, n=900, calls=12):
    """Ids, rows, scores and beliefs of each call, on the CPU."""
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        ids = torch.randint(500, (n,), generator=generator) * 0x9E3779B97F4A7C1 + call % 3 * 200
        rows = torch.randn(n, 6, generator=generator).to(number_dtype(dtype))
        scores = None
        if policy not in ("lru", "epoch_lru"):
            scores = torch.randint(1, 1000, (n,), generator=generator)
        yield ids, rows, scores, torch.rand(n, generator=generator) < 0.5


def on(device, tensors):
    """Moves each tensor that is not None."""
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def insert_and_evict(table, ids, rows, scores, expected_present):
    back = table.insert_and_evict(ids, rows, scores)
    return back.ids, back.rows, back.scores


OPERATIONS = {
    "find_or_insert": lambda t, ids, rows, scores, _: t.find_or_insert(ids, scores),
    "find_or_insert_slots": lambda t, ids, rows, scores, _: t.find_or_insert_slots(ids, scores),
    "insert_or_assign": lambda t, ids, rows, scores, _: (t.insert_or_assign(ids, rows, scores),),
    "insert_and_evict": insert_and_evict,
    "accum_or_assign": lambda t, ids, rows, scores, expected_present: (
        t.accum_or_assign(ids, rows, expected_present, scores) or ()
    ),
    "assign": lambda t, ids, rows, scores, _: (t.assign(ids, rows, scores),),
    "assign_rows": lambda t, ids, rows, scores, _: (t.assign_rows(ids, rows),),
    "assign_scores": lambda t, ids, rows, scores, _: (t.assign_scores(ids, scores),),
}


def compare(operation, policy, dtype, **options):
    tables = make(policy, dtype, **options)
    for call, batch in enumerate(batches(policy, dtype)):
        for table in tables:
            if policy in ("epoch_lru", "epoch_lfu"):
                table.epoch = call // 3
            ids, _, scores, _ = on(table.device, batch)
            table.find_or_insert(ids[:100], None if scores is None else scores[:100])
        results = [OPERATIONS[operation](table, *on(table.device, batch)) for table in tables]
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual.cpu(), expected), call
        assert_same_states(tables[0].group, tables[1].group, call)
    return tables[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation, policy):
    compare(operation, policy, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("operation", ["insert_or_assign", "insert_and_evict", "accum_or_assign"])
def test_narrow_rows(operation, dtype):
    compare(operation, "lru", dtype)


@pytest.mark.parametrize("policy", ["lru", "customized"])
def test_ids_that_are_not_admitted_are_given_back_in_order(policy):
    admission = MinFrequency(3, entries=64)
    table = compare("insert_and_evict", policy, torch.float32, admission=admission)
    assert table.counters()["unadmitted"] > 0
    assert table.counters()["evicted"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_one_row_added_to_many_times(dtype):
    """Sums are rounded after each row, in the order of the call."""
    tables = make("lru", dtype)
    ids = torch.zeros(20_000, dtype=torch.long)
    rows = torch.randn(20_000, 6).to(number_dtype(dtype))
    for table in tables:
        its = ids.to(table.device)
        table.find_or_insert(its[:1])
        table.accum_or_assign(its, rows.to(table.device), torch.ones_like(its, dtype=torch.bool))
    assert_same_states(tables[0].group, tables[1].group)


def test_rows_in_host_memory():
    """The GPU's table writes rows back and fetches them again meanwhile; evicted entries are
    equal."""
    tables = make("lru", torch.float32)
    limit = tables[0].group.hbm_bytes(0) * 3 // 4
    tiered = HashTable(
        6,
        300,
        device="cuda",
        state_dim=2,
        initializer=Uniform(-1, 1),
        deterministic=True,
        hbm_bytes=limit,
    )
    for batch in batches("lru", torch.float32, n=400):
        results = [
            insert_and_evict(table, *on(table.device, batch)) for table in (tiered, tables[1])
        ]
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual.cpu(), expected)
        assert_same_states(tiered.group, tables[1].group)
    assert tiered.counters()["written_back"] > 0
