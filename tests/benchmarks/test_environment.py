"""A benchmark's results file: a run replaces the rows that it measures again, and keeps all
others."""

from __future__ import annotations

import csv

from benchmarks.environment import report


def _read(path):
    rows = list(csv.DictReader(path.open(newline="")))
    kept = ("what", "ranks", "ms", "new")
    return [{name: row[name] for name in row if name in kept} for row in rows]


def test_a_run_of_a_part_replaces_its_rows(tmp_path):
    path, keys = tmp_path / "deep" / "b.csv", ("what", "ranks")
    report([{"what": w, "ranks": r, "ms": 1.5} for w in "ab" for r in (1, 2)], path, keys)
    assert [tuple(row.values()) for row in _read(path)] == [
        ("a", "1", "1.5"),
        ("a", "2", "1.5"),
        ("b", "1", "1.5"),
        ("b", "2", "1.5"),
    ]
    report([{"what": "a", "ranks": 2, "ms": None}, {"what": "c", "ranks": 1, "ms": 3}], path, keys)
    assert [tuple(row.values()) for row in _read(path)] == [
        ("a", "1", "1.5"),
        ("a", "2", ""),
        ("b", "1", "1.5"),
        ("b", "2", "1.5"),
        ("c", "1", "3"),
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["b.csv"]


def test_columns_that_are_new_or_gone(tmp_path):
    path = tmp_path / "b.csv"
    report([{"what": "a", "ms": 1}, {"what": "b", "ms": 2}], path, ("what",))
    report([{"what": "b", "new": 3}], path, ("what",))
    assert _read(path) == [
        {"what": "a", "new": "", "ms": "1"},
        {"what": "b", "new": "3", "ms": ""},
    ]


def test_rows_of_another_device_stay(tmp_path):
    path = tmp_path / "b.csv"
    report([{"what": "a", "ms": 1}], path, ("what",))
    text = path.read_text()
    device = next(csv.DictReader(path.open()))["device"]
    path.write_text(text.replace(device, "another"))
    report([{"what": "a", "ms": 2}], path, ("what",))
    assert [row["ms"] for row in _read(path)] == ["1", "2"]


def test_without_keys_a_file_is_written_anew(tmp_path):
    path = tmp_path / "b.csv"
    for ms in (1, 2):
        report([{"what": "a", "ms": ms}, {"what": "a", "ms": ms}], path)
    assert [row["ms"] for row in _read(path)] == ["2", "2"]
