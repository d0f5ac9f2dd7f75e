"""Numeric options of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from benchmarks.arguments import AtLeast

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: Options that say how much some benchmark measures.
NUMBERS = re.compile(r'"(--(?:steps|rounds|repeats?|repetitions|calls|draws|builds|requests))"')
CASES = [
    (path.stem, option)
    for path in sorted(BENCHMARKS.glob("*.py"))
    for option in NUMBERS.findall(path.read_text())
]


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("7", 7), ("100000", 100000)])
def test_numbers(text, value):
    assert AtLeast(1)(text) == value
    assert AtLeast(value)(text) == value


@pytest.mark.parametrize(("minimum", "text"), [(1, "0"), (1, "-3"), (0, "-1"), (2, "1")])
def test_too_few(minimum, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is less than {minimum}$"):
        AtLeast(minimum)(text)


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_other_text(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
        AtLeast(1)(text)


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.parametrize("number", ["0", "-1"])
def test_nothing_to_measure(name, option, number, capsys):
    benchmark = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([option, number])
    assert stopped.value.code == 2
    assert f"argument {option}: {number} is less than " in capsys.readouterr().err
