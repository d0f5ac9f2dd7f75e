"""Saves and loads take bounded host memory beyond the tables, whatever the tables' size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Peak memory belongs to a process, so the test starts one. The table is several times as large as
# what a save may take; TORCHREC_HKV_CHECKPOINT_BYTES makes it larger.
SCRIPT = """
import gc
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig
from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import ParameterConstraints, checkpoint

def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

def grown(function):
    gc.collect()  # a load does it, and what it freed would hide what the load takes
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mb()
    function()
    return peak_mb() - before

folder, size = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(2)
DIM = 128
STAGING = 64 << 20
rows = size // (8 * DIM)

def make(capacity):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=capacity, embedding_dim=DIM, feature_names=["f"]
    )
    constraints = {
        "t": ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"])
    }
    model = make_model([table], torch.optim.Adagrad, {"lr": 0.1})
    return shard_model(model, constraints, 1, torch.device("cpu"))

def fill(model, seed):
    group = local_tables(model)["t"]._group
    generator = torch.Generator().manual_seed(seed)
    for _ in range(0, int(0.9 * rows), 20000):
        ids = torch.randint(-2**63, 2**63 - 1, (20000,), generator=generator)
        group.find_or_insert(ids, torch.tensor([0, 20000]), 1)
    return group.sizes()[0]

source = make(rows)
entries = fill(source, 0)
checkpoint.save(folder / "small", make(1000))  # imports, and threads that begin
print(grown(lambda: checkpoint.save(folder / "c", source)))
# Copies that wait for the disk: the call waits where there are more.
staged = []
def save_behind():
    handle = checkpoint.save(folder / "n", source, blocking=False, staging_bytes=STAGING)
    handle.wait()
    staged.append(handle.staged_bytes)
print(grown(save_behind))
assert STAGING / 2 < staged[0] <= STAGING
digest = checkpoint.digest(source)
del source
for capacity in (rows, int(1.1 * rows)):  # slot for slot, and placed anew
    target = make(capacity)
    fill(target, 1)  # its pages are mapped before, so that only the load's own memory counts
    source_folder = folder / ("c" if capacity == rows else "n")
    print(grown(lambda: checkpoint.load(source_folder, target)))
    assert checkpoint.digest(target) == digest
    del target
print(sum(file.stat().st_size for file in (folder / "c").rglob("shard-*")) / 2**20)
"""


@pytest.mark.slow
def test_host_memory(tmp_path):
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs /proc/self/clear_refs")
    size = int(os.environ.get("TORCHREC_HKV_CHECKPOINT_BYTES", str(400 << 20)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(size)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    blocking, behind, *loads, saved = (float(line) for line in done.stdout.split())
    grown = [blocking, behind, *loads]
    print(f"MiB beyond the tables: {grown}; saved {saved} MiB")
    assert saved > 0.8 * size / 2**20
    # 256 MiB for batches, scans, allocators and threads.
    assert max(blocking, *loads) < 256 + 154, grown
    assert behind < 256 + 154 + 64, grown  # and the copies
