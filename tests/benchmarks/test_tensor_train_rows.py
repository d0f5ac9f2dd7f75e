"""The benchmark of Tensor-Train tables by number of rows runs, at sizes too small for meaningful
figures."""

import csv

import torch

from benchmarks import tensor_train_rows


def test_a_row_for_each_size_and_stream(tmp_path):
    out = tmp_path / "out.csv"
    threads = torch.get_num_threads()
    sizes = ["--rows", "900", "90000", "--dim", "8", "--rank", "4", "--ids", "320"]
    try:
        tensor_train_rows.main([*sizes, "--rounds", "2", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rows"], row["stream"]) for row in rows] == [
        (n, stream) for stream in tensor_train_rows.STREAMS for n in ("900", "90000")
    ]
    assert [float(row["over_first"]) for row in rows[::2]] == [1.0, 1.0]
    assert all(float(row["rows_per_prefix"]) >= 1 for row in rows)
