"""The benchmark beside FBGEMM runs, at sizes too small for meaningful figures."""

import csv

import pytest
import torch

pytest.importorskip("fbgemm_gpu")

from benchmarks import training_step_cpu


def test_a_row_for_each_optimizer_and_stream(tmp_path):
    """The benchmark itself compares the rows of both sides, and fails where they differ."""
    out = tmp_path / "out.csv"
    threads = torch.get_num_threads()
    arguments = ["--tables", "2", "--rows", "300", "--dim", "8", "--batch", "16", "--steps", "3"]
    try:
        training_step_cpu.main([*arguments, "--load", "0.5", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["optimizer"], row["stream"]) for row in rows} == {
        (optimizer, stream)
        for optimizer in ("sgd", "rowwise_adagrad")
        for stream in ("uniform", "power law", "one id a bag")
    }
    assert all(float(row["hkv_step_ms"]) > 0 and float(row["factor"]) > 0 for row in rows)
