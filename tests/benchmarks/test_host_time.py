"""The benchmark of the host's time runs, at sizes at which its figures say nothing."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--tables", "3", "--rows", "300", "--batches", "4", "8", "--device", "cpu"]
ARGUMENTS += ["--steps", "2", "--rounds", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding"), [(1, "table_wise"), (2, "row_wise")])
def test_a_row_for_each_part_and_batch(tmp_path, ranks, sharding):
    out = tmp_path / "out.csv"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "benchmarks.host_time", *ARGUMENTS]
    done = subprocess.run(
        [*command, "--sharding", sharding, "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["what"]) for row in rows] == [
        (batch, part)
        for batch in ("4", "8")
        for part in ("input_dist", "lookup", "backward", "step")
    ]
    for row in rows:
        assert (row["ranks"], row["sharding"]) == (str(ranks), sharding)
        stock, hkv = float(row["stock_us"]), float(row["hkv_us"])
        assert stock > 0
        assert float(row["ratio"]) == pytest.approx(hkv / stock, rel=0.05)
