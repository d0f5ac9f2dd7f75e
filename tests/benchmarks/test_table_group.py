"""The benchmark of groups runs, at sizes too small for meaningful figures."""

import argparse
import csv

from benchmarks import table_group


def test_a_row_for_each_operation_and_number_of_tables(device_type, tmp_path):
    out = tmp_path / "out.csv"
    arguments = ["--device", device_type, "--capacity", "20000", "--ids", "500", "--calls", "3"]
    arguments += ["--dims", "4", "2", "--loads", "0.5", "--tables", "1", "3", "--out", str(out)]
    table_group.main(arguments)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["tables"] for row in rows] == ["1"] * 7 + ["3"] * 7
    assert len({(row["tables"], row["operation"], row["present"]) for row in rows}) == 14
    assert all(float(row["group_ms"]) > 0 and float(row["tables_ms"]) > 0 for row in rows)


def test_both_hold_the_same(device_type):
    """Both variants do the same work."""
    arguments = argparse.Namespace(device=device_type, capacity=6000, ids=300, dims=[4, 2])
    together, apart = (table_group.Tables(arguments, 3, grouped) for grouped in (True, False))
    together.fill(0.5, 6000)
    apart.fill(0.5, 6000)
    sizes = together.group.sizes()
    assert sizes == [table.size for table in apart.tables] == [1000] * 3
    batch, new = together.mixed(0.6)
    assert [len(part) for part in batch.parts] == [100] * 3
    there = together.group.contains(batch.ids, batch.offsets, 1)
    assert [int(part.sum()) for part in there.split(100)] == [60] * 3
    together.insert_or_assign(batch)
    assert together.group.sizes() == [1040] * 3
    together.erase(new)
    assert together.group.sizes() == sizes
