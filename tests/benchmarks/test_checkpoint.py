"""The benchmark of checkpoints runs, at a size at which its figures say nothing."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("more", [[], ["--same-model", "--optimizer", "adam"]])
def test_a_row_each_time(tmp_path, more):
    """It compares what was loaded itself, and stops where that is not what was saved."""
    out = tmp_path / "out.csv"
    arguments = ["--gigabytes", "0.002", "--device", "cpu", "--dim", "8", "--out", str(out), *more]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert all(float(row["save_s"]) > 0 and float(row["load_s"]) > 0 for row in rows)
    assert not list(tmp_path.glob("torchrec_hkv_*"))
