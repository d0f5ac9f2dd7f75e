"""The benchmark of the host's time runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.benchmark_runs import run_benchmark

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--tables", "3", "--rows", "300", "--batches", "4", "8", "--device", "cpu"]
ARGUMENTS += ["--steps", "2", "--rounds", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding"), [(1, "table_wise"), (2, "row_wise")])
def test_a_row_for_each_part_and_batch(tmp_path, ranks, sharding):
    out = tmp_path / "out.csv"
    arguments = [*ARGUMENTS, "--sharding", sharding, "--out", str(out)]
    done = run_benchmark("host_time", *arguments, ranks=ranks)
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
