"""A table takes its announced memory, in HBM and in host memory."""

import pytest
import torch

from tests.support.batches import Bags, find, lookup, random_ids, rows_by_id
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import (
    SGD,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    gpu_table_bytes,
    hbm_share_for,
    hbm_slots_for,
    initial_rows,
    table_memory,
)

#: A GPU's table allocates host memory in chunks of rows and of states.
PIECE = 2 << 20


@pytest.mark.parametrize("capacity", [1, 64, 65, 1000, 12_345])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_announced_bytes_are_what_the_table_takes(device_type, capacity, eviction):
    group = TableGroup(
        [TableSpec("t", capacity, 5, eviction)], [0], RowWiseAdagrad(), device=device_type
    )
    memory = table_memory(capacity, 5, 1, eviction)
    assert capacity <= memory.num_slots < capacity + -(-capacity // 64)
    taken = group.hbm_bytes(0), group.host_bytes(0)
    assert taken == ((memory.bytes, 0) if device_type == "cuda" else (0, memory.bytes))


def test_index_bytes_a_slot():
    memory = table_memory(1 << 20, 64, 0, "lru")
    assert memory.index_bytes / memory.num_slots <= 14.01
    memory = table_memory(1 << 20, 64, 0, "lfu")
    assert memory.index_bytes / memory.num_slots <= 22.01


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("state_width", [0, 8])
def test_rows_beyond_hbm_bytes_lie_in_host_memory(share, state_width):
    memory = table_memory(1000, 8, state_width, "lru")
    hbm_bytes = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
    frames = hbm_slots_for(memory, hbm_bytes)
    wanted = share * memory.num_slots
    assert frames == wanted or wanted * 0.9 - 4 <= frames < wanted  # in sets, with their tags
    hbm, host = gpu_table_bytes(memory, hbm_bytes)
    assert hbm <= hbm_bytes
    assert host == (0 if share == 1.0 else memory.num_slots * memory.row_bytes)
    assert hbm_slots_for(memory, None) == memory.num_slots
    assert gpu_table_bytes(memory, None) == (memory.bytes, 0)


@pytest.mark.parametrize("state_width", [1, 4])
def test_narrow_states_of_all_slots_are_in_hbm(state_width):
    memory = table_memory(10_000, 64, state_width, "lru")
    slots, states = memory.num_slots, memory.num_slots * 4 * state_width
    hbm_bytes = memory.index_bytes + states + slots * 64 * 4 // 10
    share = hbm_share_for(memory, hbm_bytes)
    assert share.all_states
    assert slots * 0.09 < share.slots < slots * 0.1
    assert gpu_table_bytes(memory, hbm_bytes) == (
        memory.index_bytes + states + share.slots * 64 * 4 + share.sets * 12,
        slots * 64 * 4,
    )
    # Not if all rows are in HBM, or none.
    assert not hbm_share_for(memory, None).all_states
    assert not hbm_share_for(memory, memory.bytes).all_states
    assert not hbm_share_for(memory, memory.index_bytes).all_states


@pytest.mark.parametrize("state_width", [1, 4, 5, 32])
def test_wide_states_and_those_that_leave_rows_little_move_with_rows(state_width):
    memory = table_memory(10_000, 64, state_width, "lru")
    enough = memory.index_bytes + 2 * memory.num_slots * memory.state_bytes
    for hbm_bytes in (enough - 1, enough):
        its = hbm_share_for(memory, hbm_bytes)
        assert its.slots > 0
        assert its.all_states == (state_width <= 4 and hbm_bytes == enough)
        hbm, host = gpu_table_bytes(memory, hbm_bytes)
        assert hbm <= hbm_bytes
        if its.all_states:
            continue
        assert hbm == memory.index_bytes + its.slots * memory.row_bytes + its.sets * 12
        assert host == memory.num_slots * memory.row_bytes


def test_too_few_frames_are_none():
    memory = table_memory(1 << 20, 8, 1, "lru")
    few = memory.index_bytes + 100 * memory.row_bytes
    assert hbm_slots_for(memory, few) == 0
    assert gpu_table_bytes(memory, few) == (
        memory.index_bytes,
        memory.num_slots * memory.row_bytes,
    )


@needs_gpu
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad()])
def test_training_over_two_memories(share, optimizer):
    """Rows in host memory are looked up, trained, saved and loaded like rows in HBM."""
    memory = table_memory(1000, 8, 0 if optimizer == SGD() else 1, "lru")
    hbm_bytes = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
    split = TableSpec("t", 1000, 8, hbm_bytes=hbm_bytes, initializer=Uniform(-1, 1))
    groups = [
        TableGroup([spec], [0], optimizer, device="cuda")
        for spec in (split, TableSpec("t", 1000, 8, initializer=Uniform(-1, 1)))
    ]
    assert groups[0].hbm_bytes(0) <= hbm_bytes
    taken = groups[0].hbm_bytes(0), groups[0].host_bytes(0)
    announced = gpu_table_bytes(memory, hbm_bytes)
    assert taken[0] == announced[0]
    assert announced[1] <= taken[1] <= announced[1] + 2 * PIECE
    pool = random_ids(900)
    for _ in range(5):
        bags = Bags.random(1, 300, pool).to("cuda")
        grad = torch.randn(300, 8, device="cuda")
        outs = [lookup(group, bags) for group in groups]
        assert torch.equal(outs[0], outs[1])
        for out in outs:
            out.backward(grad)
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])
    fresh = TableGroup([split], [0], optimizer, device="cuda")
    fresh.load_table(0, groups[0].export_table(0))
    again = rows_by_id(fresh)
    assert all(torch.equal(again[id_], row) for id_, row in rows[0].items())


@needs_gpu
def test_more_than_2_to_the_31_elements():
    """Slots, elements and bytes past 2^31: every id beyond reads its own row."""
    dim, capacity = 1024, 2_200_000  # 2.25e9 elements, 9 GB
    group = TableGroup(
        [TableSpec("t", capacity, dim, initializer=Uniform(-1, 1))], [0], SGD(), device="cuda"
    )
    n = int(capacity * 0.95)
    for part in torch.arange(n, device="cuda").split(1 << 18):
        group.find_or_insert(part, torch.tensor([0, len(part)], device="cuda"), 1)
    assert group.counters()[0]["size"] == n
    slots = find(group, Bags.flat(torch.arange(n, device="cuda")))
    past = (slots * dim > 2**31).nonzero().flatten()
    assert len(past) > 0
    ids = past[torch.randint(0, len(past), (2000,), device="cuda")].unique()
    bags = Bags(ids, torch.arange(len(ids) + 1, device="cuda"), len(ids))
    out = lookup(group, bags, learning_rate=0.5)
    expected = initial_rows(ids, dim, table="t", initializer=Uniform(-1, 1))
    assert torch.equal(out, expected)
    out.backward(torch.ones_like(out))
    assert torch.equal(lookup(group, bags), expected - 0.5)
