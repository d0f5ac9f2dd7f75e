"""The benchmark of syncs measures one table on the ranks that torchrun starts."""

from __future__ import annotations

import csv

import pytest

from tests.support.benchmark_runs import run_benchmark

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_two_replicas(tmp_path):
    out = tmp_path / "sync.csv"
    arguments = ["--rows", "20000", "--dim", "8", "--changed", "0.01"]
    arguments += ["--rounds", "2", "--device", "cpu", "--out", str(out)]
    done = run_benchmark("sync", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    measured, computed = csv.DictReader(out.open())
    assert (measured["source"], computed["source"]) == ("measured", "computed")
    assert 200 <= int(measured["touched"]) <= 400
    assert float(measured["bytes_ratio"]) < 0.05
    assert float(computed["sync_bytes"]) == pytest.approx(5000 * float(measured["sync_bytes"]))
    assert float(measured["sync_ms"]) > 0 < float(measured["all_reduce_ms"])
