"""The benchmark of DLRM-DCNv2 runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from benchmarks import dlrm_dcnv2
from tests.support.benchmark_runs import run_benchmark

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--device", "cpu", "--batches", "4", "8", "--max-rows", "300", "--dim", "8"]
ARGUMENTS += ["--bottom", "16", "--top", "16", "--cross-layers", "1", "--cross-rank", "4"]
ARGUMENTS += ["--steps", "2", "--rounds", "2", "--warm-up", "1"]


def run(*more: str) -> subprocess.CompletedProcess[str]:
    return run_benchmark("dlrm_dcnv2", *ARGUMENTS, *more)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_a_row_for_each_batch(tmp_path, sharding):
    out = tmp_path / "out.csv"
    done = run("--sharding", sharding, "--out", str(out))
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["batch"] for row in rows] == ["4", "8"]
    for row in rows:
        assert (row["max_rows"], row["sharding"]) == ("300", sharding)
        stock, hkv = float(row["stock_ms"]), float(row["hkv_ms"])
        assert float(row["ratio"]) == pytest.approx(hkv / stock, rel=0.05)


@pytest.mark.slow
def test_tables_too_full_to_hold_all_rows_are_refused():
    done = run("--load", "1.5")
    assert done.returncode != 0
    assert "a table has no room for an id; --load must be lower." in done.stderr


def test_mlperfs_tables():
    assert len(dlrm_dcnv2.ROWS) == len(dlrm_dcnv2.BAGS) == 26
    assert sum(dlrm_dcnv2.ROWS) == 204_184_588
    assert sum(dlrm_dcnv2.BAGS) == 214
