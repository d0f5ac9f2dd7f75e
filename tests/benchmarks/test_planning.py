"""The benchmark of planning many tables runs, and its bounds bound what it finds."""

from __future__ import annotations

import csv

import pytest

from benchmarks import planning


@pytest.mark.slow
def test_a_small_run(tmp_path):
    out = tmp_path / "p.csv"
    arguments = ["--tables", "14", "--ranks", "2", "--budgets", "0.2", "4.0", "--out", str(out)]
    planning.main(arguments)
    rows = list(csv.DictReader(out.open()))
    assert [(row["frequencies"], row["budget"]) for row in rows] == [
        ("0", "0.2"),
        ("0", "4.0"),
        ("1", "0.2"),
        ("1", "4.0"),
    ]
    for row in rows:
        assert int(row["fewest"]) <= int(row["lossy"])
        assert float(row["least_loss"]) <= float(row["loss"]) + 1e-5
        assert float(row["balanced_ms"]) <= float(row["step_ms"])
        assert (int(row["lossy"]) > 0) == (row["budget"] == "0.2")
        assert float(row["cpu_seconds"]) > 0
