"""The benchmark of syncs measures one table on the ranks that torchrun starts."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from benchmarks.environment import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_two_replicas(tmp_path):
    out = tmp_path / "sync.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["-m", "benchmarks.sync", "--rows", "20000", "--dim", "8", "--changed", "0.01"]
    command += ["--rounds", "2", "--device", "cpu", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    measured, computed = csv.DictReader(out.open())
    assert (measured["source"], computed["source"]) == ("measured", "computed")
    assert 200 <= int(measured["touched"]) <= 400
    assert float(measured["bytes_ratio"]) < 0.05
    assert float(computed["sync_bytes"]) == pytest.approx(5000 * float(measured["sync_bytes"]))
    assert float(measured["sync_ms"]) > 0 < float(measured["all_reduce_ms"])
