"""The benchmarks of one table run, at sizes too small for meaningful figures."""

import csv
import shutil

import pytest
import torch

from benchmarks import hash_table, hash_table_cpu
from benchmarks.ids import IdPool, power_law
from benchmarks.unordered_map import compiler
from torchrec_hkv import HashTable


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_operation_and_share_present(device_type, tmp_path):
    out = tmp_path / "out.csv"
    arguments = ["--device", device_type, "--capacity", "20000", "--ids", "500", "--calls", "3"]
    arguments += ["--dims", "4", "--loads", "0.5", "1.0", "--out", str(out)]
    hash_table.main(arguments)
    rows = read(out)
    # Two operations scan the whole table, whatever the ids.
    assert len(rows) == len({tuple(list(row.values())[:7]) for row in rows}) == 2 * (12 * 3 + 2)
    assert {row["load_factor"] for row in rows} == {"0.5", "1.0"}
    slots = {row["ids"] for row in rows if row["operation"] in ("erase_if", "export")}
    assert slots == {rows[0]["capacity"]}
    assert all(float(row["ms"]) > 0 and row["commit"] and row["command"] for row in rows)


def test_a_subset(device_type, tmp_path):
    out = tmp_path / "out.csv"
    arguments = ["--device", device_type, "--capacity", "3000", "--ids", "100", "--calls", "3"]
    arguments += ["--dims", "4", "8", "--loads", "0.75", "--operations", "find", "--present", "0.3"]
    hash_table.main([*arguments, "--power", "1.05", "--out", str(out)])
    rows = read(out)
    assert [(row["operation"], row["dim"], row["present"]) for row in rows] == [
        ("find", "4", "0.3"),
        ("find", "8", "0.3"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(compiler()) is None, reason="needs a C++ compiler")
def test_beside_unordered_map(tmp_path):
    """The benchmark itself compares rows, and fails where they differ."""
    out = tmp_path / "out.csv"
    threads = torch.get_num_threads()
    arguments = ["--capacity", "20000", "--ids", "1000", "--calls", "3", "--dim", "8"]
    try:
        hash_table_cpu.main([*arguments, "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    rows = read(out)
    assert [(row["operation"], row["load_factor"]) for row in rows] == [
        ("find", "0.5"),
        ("find_or_insert", "0.5"),
        ("find", "1.0"),
        ("find_or_insert", "1.0"),
    ]
    assert all(float(row["unordered_map_ms"]) > 0 for row in rows)


def test_drawn_ids_are_in_the_table(device_type):
    table = HashTable(4, 2000, device=device_type)
    ids = IdPool(table)
    for load in (0.5, 1.0):
        ids.fill(load)
        assert table.load_factor == pytest.approx(load, abs=0.01)
        drawn = ids.present(5000)
        assert table.contains(drawn).all()
        assert drawn.unique().numel() > 0.8 * table.size  # uniform: at least 1 - exp(-2.5)
        size = table.size
        batch = ids.mixed(100, 0.6)
        assert table.contains(batch).sum() == 60
        table.find_or_insert(batch)
        assert ids.forget().numel() == 40
        if load < 1:
            assert table.size == size


def test_the_power_law():
    torch.manual_seed(0)
    ranks = power_law(1_000_000, 1000, 1.05, torch.device("cpu"))
    counts = torch.bincount(ranks, minlength=1000).double()
    # Rank k has the mass of the density x^-1.05 from k + 1 to k + 2.
    edges = torch.arange(1, 1002, dtype=torch.float64) ** -0.05
    expected = 1_000_000 * (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    assert ((counts - expected).abs() <= 6 * expected.sqrt()).all()
