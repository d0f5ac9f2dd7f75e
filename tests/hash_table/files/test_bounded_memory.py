"""Saves and loads stay within the memory that they are allowed, whatever the table's size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.saved_tables import filled, like

ROOT = Path(__file__).parents[3]
BATCH = 16 << 20

# A table of some 200 MB. Peak memory belongs to a process, so the test starts one.
SCRIPT = """
import sys
import torch
from torchrec_hkv.hash_table import HashTable

def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

def grown(function):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mb()
    function()
    return peak_mb() - before

torch.set_num_threads(1)
path, batch = sys.argv[1], int(sys.argv[2])
capacities = [int(c) for c in sys.argv[3:]]
def table(capacity):
    return HashTable(120, capacity, eviction="lfu", state_dim=2)
source = table(capacities[0])
generator = torch.Generator().manual_seed(0)
while source.size < 0.97 * source.capacity:
    source.find_or_insert_slots(torch.randint(-2**63, 2**63 - 1, (20000,), generator=generator))
source.save(path, batch_bytes=batch)  # whatever is imported or started the first time
print(grown(lambda: source.save(path, batch_bytes=batch)))
del source
for capacity in capacities:
    target = table(capacity)
    # Its pages are mapped before, so that only the load's own memory counts.
    target._group.export_table(0)
    generator.manual_seed(1)
    for _ in range(1 + capacity // 10000):
        target.find_or_insert_slots(
            torch.randint(-2**63, 2**63 - 1, (20000,), generator=generator)
        )
    print(grown(lambda: target.load(path, batch_bytes=batch, allow_loss=True)))
    del target
"""


@pytest.mark.slow
def test_host_memory(tmp_path):
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs /proc/self/clear_refs")
    arguments = [str(tmp_path / "t"), str(BATCH), "400000", "200000"]
    # malloc maps blocks above this size separately and unmaps them when freed. In the heap, free
    # memory between other blocks would count.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **malloc},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown = [float(line) for line in done.stdout.split()]
    assert len(grown) == 3
    # 16 MiB, and some for libraries and the interpreter, which are mapped again.
    assert max(grown) < 16 + 4, grown


@pytest.mark.gpu
def test_device_memory(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    table = filled("cuda", 400_000, 400_000, dim=120, eviction="lfu", state_dim=2)
    same, other = like(table), like(table, capacity=200_000)
    for work in (
        lambda: table.save(tmp_path, batch_bytes=BATCH),
        lambda: same.load(tmp_path, batch_bytes=BATCH),
        lambda: other.load(tmp_path, batch_bytes=BATCH, allow_loss=True),
    ):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        assert torch.cuda.max_memory_allocated() - before < BATCH + (4 << 20)
