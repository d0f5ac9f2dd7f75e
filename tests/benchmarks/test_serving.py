"""The benchmark of serving runs, at sizes at which its figures say nothing."""

from __future__ import annotations

import csv

import pytest

from benchmarks import serving


@pytest.mark.slow
def test_rows(tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "300", "--ids", "60", "--dim", "16", "--requests", "2", "--rounds", "1"]
    serving.main([*sizes, "--formats", "fp32", "int8", "--out", str(out)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["format"]) for row in rows] == [
        (case, row_format)
        for row_format in ("fp32", "int8")
        for case in ("rows", "pooled", "model, rows", "model, pooled")
    ]
    assert all(float(row["us"]) > 0 and float(row["peer_us"]) > 0 for row in rows)


def test_a_case_without_stock(tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "300", "--ids", "60", "--dim", "16", "--requests", "2", "--rounds", "1"]
    serving.main([*sizes, "--formats", "fp32", "--skip-stock", "rows", "--out", str(out)])
    with out.open(newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    assert float(rows["rows"]["us"]) > 0
    assert rows["rows"]["peer_us"] == rows["rows"]["ratio"] == ""
    assert float(rows["pooled"]["peer_us"]) > 0
