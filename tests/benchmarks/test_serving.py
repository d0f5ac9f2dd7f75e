"""The benchmark of serving runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import argparse
import csv

import pytest
import torch

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_part_of_the_rows_in_hbm(tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "9000", "--ids", "4000", "--dim", "16", "--requests", "2", "--rounds", "1"]
    rest = ["--device", "cuda", "--skip-stock", "rows", "pooled", "--out", str(out)]
    for exponent in ("1.05", "1.2"):
        serving.main([*sizes, "--hbm-share", ".2", "--exponent", exponent, *rest])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 2  # distributions, formats, cases
    assert {row["memory"] for row in rows} == {"0.2 in HBM"}
    first, last = float(rows[0]["hit_rate"]), float(rows[-1]["hit_rate"])
    assert 0.6 < first < last < 1.0


@pytest.mark.parametrize(
    "arguments", [["--hbm-share", ".1"], ["--hbm-share", "1"], ["--exponent", "0"]]
)
def test_refused(arguments):
    with pytest.raises(SystemExit):
        serving.main(arguments)


def test_power_law():
    """The share of the first tenth of the rows equals that of the exact sums of powers."""
    args = argparse.Namespace(rows=10_000, ids=200_000, requests=1, uniform=False)
    for exponent in (1.05, 1.2):
        args.exponent = exponent
        (drawn,) = serving.requests_of(args)
        counts = drawn.bincount(minlength=10_000).sort(descending=True).values
        powers = torch.arange(1, 10_001, dtype=torch.float64) ** -exponent
        want = float(powers[:1000].sum() / powers.sum())
        assert float(counts[:1000].sum() / counts.sum()) == pytest.approx(want, abs=0.03)
