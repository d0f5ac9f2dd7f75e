"""The benchmark of building and opening a table runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import csv

import pytest

from benchmarks import serving_loading


@pytest.mark.parametrize("source", ["memory", "checkpoint"])
def test_rows(source, tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "3000", "--dim", "16", "--memory", "40000", "--sequential", "1000000"]
    sizes += ["--checkpoint"] if source == "checkpoint" else []
    serving_loading.main([*sizes, "--folder", str(tmp_path), "--out", str(out)])
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["source"], row["format"]) == (source, "int8")
    assert (int(row["read_bytes"]) > 3000 * 64) == (source == "checkpoint")
    assert int(row["bytes"]) > 3000 * 20
    assert float(row["build_s"]) > 0
    assert float(row["map_ms"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    with pytest.raises(SystemExit):
        serving_loading.main(["--rows", "0"])
