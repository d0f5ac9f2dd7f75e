"""The matrix of shapes: cells, rows, summary and plot."""

import csv
import dataclasses

import pytest
import torch

from tests.support.gpu import needs_gpu

pytest.importorskip("fbgemm_gpu")

from benchmarks import matrix, matrix_cells, matrix_plot, matrix_random
from benchmarks.environment import report

ROW = {"section": "dim", "dims": "4x8", "skew": "1.2", "optimizer": "sgd", "dtype": "fp32"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_two_cells_are_one_row_of_the_file(device):
    sections = matrix_cells.sections(device)
    cells = [cell for cells in sections.values() for cell in cells]
    keys = [tuple(str(getattr(cell, key)) for key in matrix.KEYS) for cell in cells]
    assert len(set(keys)) == len(keys)
    assert all(cell.section == name for name, own in sections.items() for cell in own)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_random_cells_are_reproducible_and_bounded(device):
    cells = matrix_random.random_cells(device, 300, seed=3)
    assert cells == matrix_random.random_cells(device, 300, seed=3)
    assert cells != matrix_random.random_cells(device, 300, seed=4)
    assert len(set(cells)) == 300
    maximum = 200_000 if device == "cpu" else 8_000_000
    assert max(len(cell.dims) * cell.batch * cell.bag for cell in cells) <= maximum
    for name, minimum in (("skew", 5), ("batch", 4), ("bag", 7), ("policy", 4), ("reduction", 3)):
        assert len({getattr(cell, name) for cell in cells}) >= minimum
    assert all(cell.dtype == "fp32" for cell in cells if cell.optimizer == "adam")


@pytest.mark.parametrize("skew", matrix_cells.SKEWS)
def test_ids_have_the_skew_of_their_cell(skew):
    cell = matrix.Cell("dim", (8,) * 4, skew, batch=1000, bag=5, rows=2000)
    ids = matrix.draw(cell, cell.rows, torch.device("cpu"))
    assert ids.shape == (4 * 1000 * 5,)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < cell.rows
    hottest = float(ids.bincount().max()) / len(ids)
    low, high = {
        "uniform": (0.0005, 0.005),
        "1.05": (0.05, 0.3),
        "1.2": (0.1, 0.4),
        "1.5": (0.25, 0.6),
        "hot": (0.88, 0.92),
    }[skew]
    assert low < hottest < high


def test_the_summary_has_the_geometric_mean_and_the_highest():
    rows = [{**ROW, "ratio": 0.5}, {**ROW, "skew": "hot", "ratio": 2.0}, {**ROW, "ratio": None}]
    text = " ".join(matrix.summary(rows).split())
    of_both = "cells 2 mean 1.000 highest 2.000 (4x8, hot, sgd)"
    assert text == f"dim {of_both} all {of_both}"
    assert matrix.summary(rows[2:]) == ""


def test_the_picture_has_each_ratio(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{**ROW, "ratio": 0.46}, {**ROW, "skew": "hot", "ratio": "1.2345"}]
    rows.append({**ROW, "section": "mixed", "ratio": 7.77})
    matrix_plot.plot(rows, tmp_path / "matrix.svg")
    text = (tmp_path / "matrix.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("0.46", "1.23", "hot", "4x8"))
    assert "7.77" not in text


@pytest.mark.parametrize("row", [{"section": "mixed", "ratio": 0.5}, {"ratio": None}])
def test_no_picture_of_no_ratios(tmp_path, row):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="No row has a ratio to draw: measure one of the sections"):
        matrix_plot.plot([{**ROW, **row}], tmp_path / "matrix.svg")


@needs_gpu
@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted"])
def test_a_cell_is_measured(reduction):
    cell = matrix.Cell("dim", (8, 132), "1.2", batch=64, bag=3, rows=500, reduction=reduction)
    times = matrix.measure_cell(dataclasses.replace(cell, policy="lfu"), torch.device("cuda"))
    assert all(time > 0 for time in times.values())


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_a_cell_is_measured_on_a_cpu(dtype, reduction):
    cell = matrix.Cell("dim", (8, 132), "1.2", batch=64, bag=3, rows=500, reduction=reduction)
    cell = dataclasses.replace(cell, dtype=dtype, policy="lfu")
    times = matrix.measure_cell(cell, torch.device("cpu"))
    assert all(time > 0 for time in times.values())
    parts = times["hkv_forward_ms"] + times["hkv_backward_ms"]
    assert parts <= times["hkv_ms"] * 1.01  # each is the minimum


def test_no_ratio_where_fbgemm_lacks_the_optimizer_on_a_cpu():
    cell = matrix.Cell("dim", (8,), batch=16, bag=3, rows=500, optimizer="adam")
    times = matrix.measure_cell(cell, torch.device("cpu"))
    assert times["hkv_ms"] > 0
    assert times["ratio"] is None
    assert times["fbgemm_ms"] is None


def test_rows_of_a_cpu_go_to_a_file(tmp_path):
    cells = [matrix.Cell("dim", (8,) * 2, skew, 16, 3, 300) for skew in ("1.2", "hot")]
    out = tmp_path / "matrix.csv"
    report(matrix.measure(torch.device("cpu"), cells), out, matrix.KEYS)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["skew"] for row in rows] == ["1.2", "hot"]
    assert all(float(row["ratio"]) > 0 and float(row["cpu_ratio"]) > 0 for row in rows)


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        matrix.main(["--device", "cpu", "--sections", "dim", "mixed"])
    assert "--device cpu has no section 'mixed'; it has dim, lfu" in capsys.readouterr().err
