"""``python -m benchmarks`` lists the benchmarks and runs one by its name."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import run_python

FOLDER = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "benchmarks", *arguments], os.environ, folder=FOLDER)


def test_the_list_has_every_benchmark_and_what_it_measures():
    listed = run("--list")
    assert listed.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in listed.stdout.splitlines())
    assert {"matrix", "training_step", "hash_table", "tensor_train"} <= set(lines)
    assert not {"__main__", "ids"} & set(lines)  # no benchmarks of their own
    assert all(lines.values())


def test_an_unknown_name():
    refused = run("matrx")
    assert refused.returncode == 2
    assert "there is no benchmark 'matrx'; known are " in refused.stderr
    assert "matrix" in refused.stderr


@pytest.mark.slow
def test_arguments_go_to_the_benchmark():
    helped = run("table_group", "--help")
    assert helped.returncode == 0
    assert "--capacity" in helped.stdout
