"""The benchmark of the quality of exported models runs, on few rows."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import serving_quality


@pytest.mark.slow
def test_rows(tmp_path):
    random = torch.Generator().manual_seed(1)
    draws = torch.randint(1, 300, (600, 3), generator=random).tolist()
    lines = [f"{user}::{movie}::{of % 10}::{n}" for n, (user, movie, of) in enumerate(draws)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines))
    out = tmp_path / "out.csv"
    arguments = ["--data", str(tmp_path / "ratings.dat"), "--dim", "64", "--seeds", "1"]
    serving_quality.main([*arguments, "--formats", "int8", "--out", str(out)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["format"] for row in rows] == ["fp32", "int8"]
    assert (float(rows[0]["difference"]), float(rows[0]["bytes_ratio"])) == (0.0, 1.0)
    assert 0.25 < float(rows[1]["bytes_ratio"]) < 0.35
    assert abs(float(rows[1]["difference"])) < 0.05
    with pytest.raises(SystemExit):
        serving_quality.main(["--data", str(tmp_path / "none.dat")])
