"""The benchmark of the standalone embedding runs, at sizes too small for meaningful figures."""

import csv

from benchmarks import nn


def test_a_row_for_each_optimizer(tmp_path):
    out = tmp_path / "out.csv"
    sizes = ["--rows", "300", "--dim", "8", "--ids", "64", "--steps", "2", "--device", "cpu"]
    nn.main([*sizes, "--optimizers", "adam", "adagrad", "sgd", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer"] for row in rows] == ["adam", "adagrad", "sgd"]
    assert all(float(row["hkv_ms"]) > 0 and float(row["torch_ms"]) > 0 for row in rows)
    assert all(float(row["difference"]) < 1e-4 for row in rows)
