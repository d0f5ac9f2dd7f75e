"""The benchmark of checkpoints runs, at a size too small for meaningful figures."""

import csv
from pathlib import Path

import pytest

from tests.support.benchmark_runs import run_benchmark

ROOT = Path(__file__).parents[2]


def run(tmp_path, *more):
    out = tmp_path / "out.csv"
    arguments = ["--bytes", "2e6", "--device", "cpu", "--dim", "8", "--out", str(out), *more]
    done = run_benchmark("checkpoint", *arguments, variables={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    with out.open() as file:
        return list(csv.DictReader(file)), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--same-model", "--optimizer", "adam"]])
def test_a_row_each_time(tmp_path, more):
    """The benchmark itself checks what it loads, and fails where this differs from what it
    saved."""
    rows, output = run(tmp_path, "--repeat", "2", *more)
    assert len(rows) == 2
    assert all(float(row["save_s"]) > 0 and float(row["load_s"]) > 0 for row in rows)
    assert output.count("the digests are equal") == 2
    assert not list(tmp_path.glob("torchrec_hkv_*"))


@pytest.mark.slow
def test_what_would_not_end_in_time_is_left_out(tmp_path):
    rows, output = run(tmp_path, "--time-limit", "0.001")
    assert rows == []
    assert "disk, " in output
    assert "the save left out" in output
