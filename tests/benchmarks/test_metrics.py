"""The benchmark of metrics runs, at sizes too small for meaningful figures."""

import csv
import random

import pytest

from benchmarks import metrics

SIZES = ["--tables", "2", "--rows", "500", "--dim", "4", "--ids", "64", "--device", "cpu"]


@pytest.mark.slow
def test_a_row_for_each_case(tmp_path):
    out = tmp_path / "out.csv"
    metrics.main([*SIZES, "--steps", "4", "--every", "2", "--seconds", "0.1", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == ["watch", "remember_evicted"]
    assert all(float(row["without_ms"]) > 0 and float(row["with_ms"]) > 0 for row in rows)
    for row in rows:
        bounds = [float(row[key]) for key in ("overhead_low", "overhead", "overhead_high")]
        assert bounds == sorted(bounds)
        assert int(row["pairs"]) >= 2
        assert row["command"]


def test_the_interval_of_a_median():
    """The width follows the normal approximation: half of a 95 % interval is 1.96 · 1.253 · sigma /
    sqrt(n)."""
    draw = random.Random(1)
    low, high = metrics.bootstrap_interval([draw.gauss(3, 1) for _ in range(900)])
    assert low < 3 < high
    assert (high - low) / 2 == pytest.approx(1.96 * 1.253 / 30, rel=0.3)


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        metrics.main([*SIZES, "--steps", "4", "--every", "0"])
    assert "argument --every: 0 is less than 1" in capsys.readouterr().err
