"""The benchmark of metrics runs, at sizes at which its figures say nothing."""

import csv

import pytest

from benchmarks import metrics

SIZES = ["--tables", "2", "--rows", "500", "--dim", "4", "--ids", "64", "--device", "cpu"]


def test_a_row_for_each_case(tmp_path):
    out = tmp_path / "out.csv"
    metrics.main([*SIZES, "--steps", "4", "--every", "2", "--rounds", "2", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["watch", "remember_evicted"]
    assert all(float(row["without_ms"]) > 0 and float(row["with_ms"]) > 0 for row in rows)
    assert all("overhead" in row and row["command"] for row in rows)


def test_a_round_without_a_reading_is_refused(capsys):
    with pytest.raises(SystemExit):
        metrics.main([*SIZES, "--steps", "4", "--every", "5"])
    assert "--steps is 4, but must be at least --every, 5" in capsys.readouterr().err
