"""The benchmark of the planner runs, and its columns are correct."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import planner
from tests.support.benchmark_runs import run_benchmark
from tests.support.calibrations import calibration

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks(tmp_path):
    calibration(fused=1e-3, hkv=2e-3, tt=3e-3).save(tmp_path / "c.json")
    arguments = ["--device", "cpu", "--tables", "2", "--rows", "3000", "--dims", "8"]
    arguments += ["--batch", "16", "--steps", "2", "--tt-rank", "4"]
    arguments += ["--calibration", str(tmp_path / "c.json"), "--out", str(tmp_path / "p.csv")]
    done = run_benchmark("planner", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["kernel"] for row in rows] == ["fused"] * 3 + ["hkv"] * 3 + ["tt"] * 3
    assert all(row["ranks"] == "2" and abs(float(row["bytes_ratio"]) - 1) <= 0.05 for row in rows)
    within = sum(abs(float(row["step_ratio"]) - 1) <= 0.25 for row in rows)
    assert f"of 9 rows: steps within 25 %: {within}, bytes within 5 %: 9" in done.stdout


def test_a_small_run(tmp_path):
    calibration(fused=1e-3, hkv=2e-3, tt=3e-3).save(tmp_path / "c.json")
    threads = torch.get_num_threads()
    arguments = ["--device", "cpu", "--threads", "1", "--tables", "2", "--rows", "300"]
    arguments += ["--dims", "8", "--batch", "16", "--steps", "2", "--tt-rank", "4"]
    arguments += ["--calibration", str(tmp_path / "c.json"), "--out", str(tmp_path / "p.csv")]
    try:
        planner.main(arguments)
    finally:
        torch.set_num_threads(threads)
    assert not dist.is_initialized()
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert len(rows) == 9
    for row, cost in zip(rows, [1e-3] * 3 + [2e-3] * 3 + [3e-3] * 3, strict=True):
        ids = 2 * 16 * {"uniform_1": 1, "uniform_8": 8, "power_law_8": 8}[row["stream"]]
        assert float(row["forward_predicted_ms"]) == pytest.approx(ids * cost + 0.25, abs=1e-3)
        assert float(row["backward_predicted_ms"]) == pytest.approx(ids * cost + 0.5, abs=1e-3)
        for part in planner.PARTS:
            assert float(row[f"{part}_ms"]) > 0
        assert int(row["table_bytes"]) == pytest.approx(int(row["table_bytes_predicted"]), rel=0.05)
