"""The benchmark of operations with a hot id runs, at a size too small for meaningful figures."""

import csv

import pytest

from benchmarks import operations


def measured(device, tmp_path, *more):
    out = tmp_path / "out.csv"
    arguments = ["--device", device, "--capacity", "6000", "--ids", "300", "--dim", "4"]
    operations.main([*arguments, "--calls", "2", "--warm", "1", "--out", str(out), *more])
    with out.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_for_each_operation_and_policy(device_type, tmp_path, deterministic):
    rows = measured(device_type, tmp_path, *(["--deterministic"] if deterministic else []))
    plain, scored = len(operations.WITHOUT_SCORES), len(operations.OPERATIONS)
    scored -= plain
    # By policy, cases of scores: never, never or always (twice), always.
    assert len(rows) == 5 * plain + scored * (1 + 2 + 1 + 2 + 1)
    assert {row["policy"] for row in rows} == set(operations.POLICIES)
    assert {row["operation"] for row in rows} == set(operations.OPERATIONS)
    assert all(
        float(row["ratio"]) > 0 and row["deterministic"] == str(deterministic) for row in rows
    )


def test_a_subset(device_type, tmp_path):
    rows = measured(device_type, tmp_path, "--policies", "lfu", "--operations", "find", "assign")
    assert [(row["operation"], row["scores"]) for row in rows] == [
        ("find", "False"),
        ("assign", "False"),
        ("assign", "True"),
    ]


def test_new_ids_are_new_in_each_call(device_type):
    table = operations.HashTable(4, 4000, device=device_type)
    batches = operations.Batches(table, 200)
    for hot in (False, True):
        for ids in batches.calls("find_or_insert new", hot, 3):
            assert not table.contains(ids).any()
            assert (len(ids.unique()) < 100) == hot
            table.find_or_insert_slots(ids)
