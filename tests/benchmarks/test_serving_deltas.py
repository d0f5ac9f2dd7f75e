"""The benchmark of requests during deltas runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import csv

import pytest

from benchmarks import serving_deltas


@pytest.mark.slow
def test_rows(tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "3000", "--dim", "16", "--ids", "40", "--deltas", "2", "--share", "0.1"]
    serving_deltas.main([*sizes, "--cases", "thread", "--folder", str(tmp_path), "--out", str(out)])
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["case"], row["deltas"]) == ("thread", "2")
    assert int(row["requests"]) > 0
    assert float(row["applying_p99_us"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    with pytest.raises(SystemExit):
        serving_deltas.main(["--share", "2"])
