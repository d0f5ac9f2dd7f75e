"""The benchmark of non-blocking saves runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import csv

import pytest

from benchmarks.non_blocking import main


@pytest.mark.slow
@pytest.mark.parametrize("delta", ["0", "0.5"])
def test_rows(device_type, tmp_path, delta):
    out = tmp_path / "rows.csv"
    sizes = ["--bytes", "2e6", "--batch", "256", "--dim", "8", "--seconds", "0.2"]
    main([*sizes, "--device", device_type, "--delta", delta, "--repeat", "2", "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 2
    for row in rows:
        assert row["what"] == ("save" if delta == "0" else "delta of 0.5")
        assert float(row["stop_ms"]) > float(row["blocked_ms"]) == 0
        staged = "device_staged_gb" if device_type == "cuda" else "staged_gb"
        assert float(row[staged]) > 0
        assert 0 < float(row["written_share"]) <= 1
        assert float(row["step_ms"]) > 0
        assert row["commit"]


@pytest.mark.slow
def test_a_save_that_takes_too_long_is_given_up(tmp_path):
    out = tmp_path / "rows.csv"
    main(["--bytes", "2e7", "--seconds", "0.01", "--device", "cpu", "--out", str(out)])
    (row,) = csv.DictReader(out.open())
    assert float(row["written_share"]) <= 1
