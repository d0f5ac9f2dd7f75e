"""Under torchrun, an error on one rank ends all ranks within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = """
import datetime
import sys
import time

import torch
import torch.distributed as dist
from tests.support.small_models import batch, make_small

on_gpu = sys.argv[1] == "cuda"
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=10))
rank = dist.get_rank()
device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
model = make_small(2, device, "hkv")
model(batch(rank, device, 0)).sum().backward()
print("trained", time.time(), flush=True)
model(batch(rank, device, 1, dtype=torch.float32 if rank == 1 else torch.int64)).sum().backward()
print("not reached", flush=True)
"""


@pytest.mark.slow
def test_float_ids_on_one_rank_end_both(device_type, tmp_path):
    if device_type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", str(script), device_type]
    paths = [str(root), os.environ.get("PYTHONPATH")]
    ended = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    end = time.time()
    assert ended.returncode != 0
    trained = [float(line.split()[1]) for line in ended.stdout.splitlines() if "trained" in line]
    assert len(trained) == 2, ended.stderr
    assert "not reached" not in ended.stdout
    assert "ValueError: The ids have dtype torch.float32, but must have" in ended.stderr
    assert end - max(trained) < 60  # the process group alone would wait ten minutes
