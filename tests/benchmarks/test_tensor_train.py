"""The GPU's benchmark of Tensor-Train tables runs, at sizes too small for meaningful figures."""

import csv

import pytest
import torch

from benchmarks import tensor_train
from tests.support.gpu import needs_gpu


@needs_gpu
def test_a_row_for_each_workload_and_precision(tmp_path):
    out = tmp_path / "out.csv"
    tensor_train.main(["--divisor", "20", "--steps", "2", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(tensor_train.WORKLOADS)
    limits = {"tf32": 1e-3, "fp32": 1e-5}
    assert all(float(row["error"]) <= limits[row["precision"]] for row in rows)
    for column in (
        "eager_ns_per_id", "eager_one_thread_ns_per_id", "single_ns_per_id", "graph_ns_per_id"
    ):  # fmt: skip
        assert all(float(row[column]) > 0 for row in rows)
    beside = {row["workload"] for row in rows if row["ratio"]}
    assert beside == ({"1.31M power law"} if tensor_train.HAS_FBGEMM else set())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_says_that_it_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        tensor_train.main([])
    assert "needs a CUDA GPU" in capsys.readouterr().err
