"""The benchmark of hot rows: its lookups and bytes are correct, and it runs."""

import csv

import pytest
import torch

from benchmarks import tensor_train_hot_rows
from benchmarks.tensor_train_hot_rows import COLUMNS, DIM, Table, Variant, power_law
from torchrec_hkv.tensor_train import rows_of

RATIO = 5.0


@pytest.fixture(scope="module")
def log():
    return power_law(1.0, rows=3000, ids=400)


def made(log, name, share=0.3):
    return Table(log, "user", RATIO, Variant(name, share), torch.Generator().manual_seed(0))


def test_frequent_ids_are_hot(log):
    table = made(log, "add")
    counts = torch.bincount(table.ids[: log.train], minlength=400)
    assert bool((counts.diff() <= 0).all())
    assert table.hot > 3


@pytest.mark.parametrize("name", ["plain", "smaller cores", "replace", "add"])
def test_bytes_are_at_most_the_budget(log, name):
    table = made(log, name, 0.0 if name == "plain" else 0.3)
    budget = 4 * DIM * 400 / RATIO
    assert 4 * table.shape.num_elements + 72 * table.hot <= budget
    assert (table.hot == 0) == (name == "plain")


@pytest.mark.parametrize("name", ["replace", "add"])
def test_rows_start_from_those_of_the_cores_and_differ_where_hot_rows_do(log, name):
    table = made(log, name)
    positions = torch.arange(200)
    of_cores = rows_of(table.shape, table.cores, table.ids[positions])
    assert torch.allclose(table.look_up(positions, False), of_cores, atol=1e-6)
    with torch.no_grad():
        table.rows.weight += 1
    changed = table.look_up(positions, False) - of_cores
    expected = (table.ids[positions] < table.hot).float()[:, None].expand(-1, DIM)
    assert torch.allclose(changed, expected, atol=1e-5)


def test_only_added_rows_leave_the_gradient_to_the_cores(log):
    for name, touched in (("replace", False), ("add", True)):
        table = made(log, name)
        hot = (table.ids < table.hot).nonzero().flatten()[:20]
        before = [core.clone() for core in table.cores]
        table.look_up(hot, True).sum().backward()
        same = all(torch.equal(a, b) for a, b in zip(before, table.cores, strict=True))
        assert same == (not touched)
        assert table.rows.weight.grad is not None


def test_runs(tmp_path):
    out, threads = tmp_path / "out.csv", torch.get_num_threads()
    try:
        tensor_train_hot_rows.main(
            [
                *("--powers", "1.0", "--ratios", "20", "--seeds", "2", "--epochs", "1"),
                *("--rows", "2000", "--out", str(out)),
            ]
        )
    finally:
        torch.set_num_threads(threads)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == [
        variant.name for variant in tensor_train_hot_rows.VARIANTS
    ]
    assert float(rows[0]["difference"]) == 0
    assert all(0 <= float(row["auc"]) <= 1 for row in rows)
    assert rows[0]["columns"] == ""
    assert rows[1]["columns"] == " ".join(COLUMNS)
