"""A model serves in a process that imports neither TorchRec nor FBGEMM."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.served_models import SEEDS, as_ids, random_batch

SUBPROCESS = """
import sys
sys.modules.update(torchrec=None, fbgemm_gpu=None)  # as if they were not installed
import torch
from torchrec_hkv import serving
model = serving.load(sys.argv[1])
out = []
for dense, ids, weighted in torch.load(sys.argv[2]):
    out.append(model(dense, serving.KeyedIds(*ids), serving.KeyedIds(*weighted)))
# It takes a second to import.
loaded = [name for name in ("torch.distributed.optim",) if name in sys.modules]
torch.save((out, loaded), sys.argv[3])
"""


@pytest.mark.slow
def test_without_torchrec(served, tmp_path):
    """In a new process."""
    _, want = served
    batches = []
    for seed in SEEDS:
        dense, features, weighted = random_batch(seed, 2 + seed)
        batches.append((dense, as_ids(features), as_ids(weighted)))
    torch.save(batches, tmp_path / "batches")
    paths = [str(tmp_path / name) for name in ("model", "batches", "out")]
    subprocess.run([sys.executable, "-c", SUBPROCESS, *paths], check=True)
    got, loaded = torch.load(tmp_path / "out")
    assert loaded == []
    for outputs, its in zip(want, got, strict=True):
        assert all(torch.equal(its[key], value) for key, value in outputs.items())
