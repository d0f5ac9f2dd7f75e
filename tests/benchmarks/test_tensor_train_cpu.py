"""The benchmark beside einsum runs, at sizes too small for meaningful figures."""

import csv

import torch

from benchmarks import tensor_train_cpu


def test_a_row_for_each_stream(tmp_path):
    """The benchmark itself compares the cores of both sides, and fails where they differ."""
    out = tmp_path / "out.csv"
    threads = torch.get_num_threads()
    sizes = ["--rows", "900", "--p", "9", "10", "11", "--rank", "5", "--ids", "200"]
    try:
        tensor_train_cpu.main([*sizes, "--rounds", "2", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["stream"] for row in rows] == ["uniform", "power law 1.2"]
    assert all(float(row["tt_ns_per_id"]) > 0 and float(row["ratio"]) > 0 for row in rows)
