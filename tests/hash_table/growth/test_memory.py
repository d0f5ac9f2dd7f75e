"""A growing table takes memory as it grows, and never a second copy of its rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.batches import Bags, insert, random_ids
from tests.support.geometry import geometry
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import (
    SGD,
    Adam,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    hbm_share_for,
    table_memory,
)

DIM = 64

# Fills a table of 2^15 slots, lets it grow to 2^18, and prints the process's peak memory before and
# after (KiB). No test may share the process, since the peak never falls.
SCRIPT = """
import resource, torch
from torchrec_hkv.hash_table import HashTable
torch.set_num_threads(2)
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def run(table, slots):
    ids = torch.arange(table.size, int(0.85 * slots))
    for part in ids.split(4096):
        table.find_or_insert_slots(part)
    assert table.num_slots == slots, table.num_slots
run(HashTable(8, 4096, initial_capacity=64), 4096)  # what a first call loads
start = most()
table = HashTable({dim}, 1 << 24, initial_capacity=1 << 15)
made = most()
run(table, 1 << 18)
full = most()
table.reserve(1 << 18)
assert table.num_slots == 1 << 19
print(start, made, full, most())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_host_memory():
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(dim=DIM)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    ).stdout
    start, made, full, grown = (1024 * int(number) for number in re.findall(r"\d+", output))
    row, small = 4 * DIM, 24 << 20
    slots = 1 << 18
    assert made - start < small  # nothing of 2^24 rows, 4 GB
    assert full - start < slots * (row + 20) + small
    # Growth splits each bucket in two: it copies the rows that move, and the table keeps their old
    # slots. A second copy would need the whole new table beside the old one.
    assert grown - start < 2 * slots * (row + 20) + small


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(
    "optimizer", [SGD(), RowWiseAdagrad(), Adam()], ids=["sgd", "rowwise_adagrad", "adam"]
)
def test_what_a_table_takes(device_type, share, optimizer):
    """Memory equals the announced size after growth, and is in proportion before."""
    state = optimizer.state_width(16)
    capacity, initial = 1 << 20, 1 << 17
    memory = table_memory(capacity, 16, state, "lfu", initial_capacity=initial)
    hbm_bytes = memory.index_bytes + int(share * memory.num_slots * memory.row_bytes)
    hbm_bytes = max(hbm_bytes, memory.least_hbm_bytes)
    spec = TableSpec("t", capacity, 16, "lfu", hbm_bytes, initial_capacity=initial,
                     initializer=Uniform(-1, 1))  # fmt: skip
    group = TableGroup([spec], [0], optimizer, device=device_type)
    first, last, slots = geometry(capacity, initial)
    assert (memory.num_slots, memory.initial_slots) == (last * slots, first * slots)
    pages = 8 * (2 << 20) if device_type == "cuda" else 0  # of each of eight arrays
    present = 0
    while present < memory.num_slots:
        assert group.present_slots(0) > present
        present = group.present_slots(0)
        taken = group.hbm_bytes(0) + group.host_bytes(0)
        expected = memory.bytes * present // memory.num_slots
        if device_type == "cuda" and share < 1:
            its = hbm_share_for(memory, hbm_bytes)
            if present > its.slots:  # all rows in host memory, and a copy of some in HBM
                state = memory.state_bytes if its.all_states else 0
                expected += its.slots * (memory.row_bytes - state)
            expected += its.sets * 12
        assert expected <= taken <= expected + pages
        assert group.hbm_bytes(0) <= hbm_bytes + pages
        insert(group, Bags.flat(random_ids(100)).to(device_type))
        group.reserve(0, min(memory.num_slots, present))
    if device_type == "cuda":
        assert (group.host_bytes(0) > 0) == (share < 1)


@needs_gpu
def test_gpu_memory():
    """The device's free memory falls by what the table reports, and rises again when the table is
    freed."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    capacity, dim = 1 << 23, 128  # 4 GiB of rows
    spec = TableSpec("t", capacity, dim, initial_capacity=1 << 18)
    group = TableGroup([spec], [0], None, device="cuda")
    small = 64 << 20
    present = 0
    while group.present_slots(0) > present:
        present = group.present_slots(0)
        torch.cuda.empty_cache()
        taken = before - torch.cuda.mem_get_info()[0]
        assert abs(taken - group.hbm_bytes(0)) < small
        group.reserve(0, min(group.num_slots, present))
    assert present == group.num_slots
    del group
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < small
