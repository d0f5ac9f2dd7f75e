"""The benchmark of growth runs, at sizes too small for meaningful figures."""

import csv

import torch

from benchmarks import growth


def test_a_row_for_each_share_of_new_ids(tmp_path):
    out = tmp_path / "out.csv"
    threads = torch.get_num_threads()
    sizes = ["--rows", "20000", "--dim", "4", "--ids", "100"]
    try:
        growth.main([*sizes, "--new", "0.5", "1", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["new"] for row in rows] == ["0.5", "1.0"]
    for row in rows:
        assert int(row["growing_steps"]) > 1
        assert float(row["growing_ms"]) <= float(row["growing_most_ms"])
        assert float(row["at_once_ms"]) > 0
