"""The benchmark of Tensor-Train shapes runs, at sizes too small for meaningful figures."""

import csv

import pytest

from benchmarks import tensor_train_shapes
from tests.support.gpu import NEEDS_GPU

SMALL = ["--ids", "60", "--divisor", "25", "--steps", "1"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_row_for_each_table_and_precision(tmp_path, device):
    out = tmp_path / "out.csv"
    tensor_train_shapes.main([*SMALL, "--device", device, "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    precisions = ["fp32"] if device == "cpu" else ["tf32", "fp32"]
    assert [(row["precision"], row["section"], row["q"], int(row["rank"])) for row in rows] == [
        (precision, case.section, " ".join(map(str, case.q)), case.rank)
        for precision in precisions
        for case in tensor_train_shapes.CASES
    ]
    assert all(float(row["ns_per_id"]) > 0 for row in rows)
    assert float(rows[0]["over_first"]) == 1.0


def test_sections_keep_the_first_table(tmp_path):
    out = tmp_path / "out.csv"
    tensor_train_shapes.main([*SMALL, "--device", "cpu", "--sections", "cores", "--out", str(out)])
    with out.open() as file:
        sections = [row["section"] for row in csv.DictReader(file)]
    assert sections == ["ranks"] + ["cores"] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "5", "--bag", "6"], "--bag is 6, but --ids is 5"),
        (["--device", "cpu", "--precisions", "tf32"], "needs --device cuda"),
    ],
)
def test_what_it_refuses(capsys, arguments, message):
    with pytest.raises(SystemExit):
        tensor_train_shapes.main(arguments)
    assert message in capsys.readouterr().err
