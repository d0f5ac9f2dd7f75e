"""The benchmark of planning many tables runs, and its results are within its bounds."""

from __future__ import annotations

import csv

import pytest

from benchmarks import planning


@pytest.mark.slow
def test_a_small_run(tmp_path):
    out = tmp_path / "p.csv"
    sizes = ["--tables", "14", "--ranks", "2", "--frequencies", "0", "1"]
    budgets = ["--budgets", "0.001", "0.2", "4.0", "--stock-budget", "4"]
    planning.main([*sizes, *budgets, "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    assert [(float(row["frequencies"]), row["budget"]) for row in rows] == [
        (share, budget) for share in (0.0, 1.0) for budget in ("0.001", "0.2", "4.0")
    ]
    for row in rows:
        assert float(row["cpu_seconds"]) > 0
        assert ("bytes" in row["missing"]) == (row["budget"] == "0.001")
        if row["missing"]:
            assert row["lossy"] == row["step_ms"] == ""
            continue
        assert int(row["tried"]) > 0
        assert int(row["fewest"]) <= int(row["lossy"])
        assert float(row["least_loss"]) <= float(row["loss"]) + 1e-5
        assert float(row["balanced_ms"]) <= float(row["step_ms"])
        assert float(row["bytes_ratio"]) >= 1
        assert (int(row["lossy"]) > 0) == (row["budget"] == "0.2")
        if row["budget"] == "4.0":
            assert float(row["step_ms"]) <= float(row["stock_ms"]) + 1e-4
